"""Which part of a model a rank holds."""

from __future__ import annotations


class Mapping:
    """Sizes of the parallel groups and this rank's place in them.

    ValueError if `world_size != tp_size * pp_size * cp_size` or the MoE sizes do not multiply to `tp_size`.
    """

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        enable_attention_dp: bool = False,
    ) -> None:
        if world_size != tp_size * pp_size * cp_size:
            raise ValueError(
                f"world_size ({world_size}) must be tp_size ({tp_size}) * pp_size ({pp_size})"
                f" * cp_size ({cp_size})"
            )
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.tp_size, self.pp_size, self.cp_size = tp_size, pp_size, cp_size
        self.moe_cluster_size, self.moe_tp_size, self.moe_ep_size = _moe_sizes(
            tp_size, moe_cluster_size, moe_tp_size, moe_ep_size
        )
        self.enable_attention_dp = enable_attention_dp

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def cp_rank(self) -> int:
        """Rank in the context-parallel group."""
        return self.rank % (self.tp_size * self.cp_size) // self.tp_size

    @property
    def pp_rank(self) -> int:
        """Rank in the pipeline."""
        return self.rank // (self.tp_size * self.cp_size)

    @property
    def moe_tp_rank(self) -> int:
        """Rank in the group that splits each expert."""
        return self.tp_rank // (self.moe_ep_size * self.moe_cluster_size)

    @property
    def moe_ep_rank(self) -> int:
        """Rank in the group that splits the set of experts."""
        return self.tp_rank % self.moe_ep_size

    @property
    def dp_size(self) -> int:
        """Number of ranks that attend to requests of their own."""
        return self.tp_size if self.enable_attention_dp else 1

    @property
    def tp_group(self) -> list[int]:
        """Ranks of the own tensor-parallel group."""
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))

    def has_tp(self) -> bool:
        """Whether weights are split over ranks."""
        return self.tp_size > 1

    def has_pp(self) -> bool:
        """Whether layers are split over ranks."""
        return self.pp_size > 1

    def has_cp(self) -> bool:
        """Whether sequences are split over ranks."""
        return self.cp_size > 1

    def is_first_pp_rank(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.pp_rank == self.pp_size - 1

    def pp_layers(self, num_layers: int) -> list[int]:
        """Absolute ids of the layers of this rank; the first ranks take one more where it is uneven."""
        share, extra = divmod(num_layers, self.pp_size)
        start = self.pp_rank * share + min(self.pp_rank, extra)
        return list(range(start, start + share + (self.pp_rank < extra)))


def _moe_sizes(tp_size: int, cluster: int, tp: int, ep: int) -> tuple[int, int, int]:
    """Fill in sizes given as -1: the cluster with 1, then expert or tensor parallel with the rest."""
    cluster = 1 if cluster == -1 else cluster
    if tp == -1 and ep == -1:
        tp, ep = tp_size // cluster, 1
    elif tp == -1:
        tp = tp_size // (ep * cluster)
    elif ep == -1:
        ep = tp_size // (tp * cluster)
    if cluster * tp * ep != tp_size:
        raise ValueError(
            f"moe_cluster_size ({cluster}) * moe_tp_size ({tp}) * moe_ep_size ({ep})"
            f" must be tp_size ({tp_size})"
        )
    return cluster, tp, ep
