"""Options of the expert load balancer."""

from typing import Dict, List, Optional

from pydantic import Field, NonNegativeInt, PositiveInt, PrivateAttr

from .llm_strict import StrictBaseModel


class MoeLoadBalancerConfig(StrictBaseModel):
    """Replicas of experts in `num_slots` slots, and how often they move.

    `initial_global_assignments` holds the expert of each slot by layer; without it the experts come in order
    and begin again. Each iteration moves the experts of `layer_updates_per_iter` layers, 0: none.
    """

    num_slots: Optional[PositiveInt] = None
    initial_global_assignments: Optional[Dict[int, List[int]]] = Field(default=None, repr=False)
    layer_updates_per_iter: NonNegativeInt = 0
    _ep_rank: Optional[int] = PrivateAttr(default=None)
    _ep_size: Optional[int] = PrivateAttr(default=None)

    def setup(self, ep_rank: int, ep_size: int) -> None:
        """Say which rank this is. ValueError unless the ranks can share `num_slots` evenly."""
        if self.num_slots is None or self.num_slots % ep_size:
            raise ValueError(f"load_balancer.num_slots={self.num_slots} is no multiple of {ep_size} ranks")
        self._ep_rank, self._ep_size = ep_rank, ep_size

    @property
    def ep_rank(self) -> Optional[int]:
        """The rank, None before `setup`."""
        return self._ep_rank

    @property
    def ep_size(self) -> Optional[int]:
        """The number of ranks, None before `setup`."""
        return self._ep_size

    @property
    def num_local_slots(self) -> int:
        """Slots of this rank. ValueError before `setup`."""
        if self.num_slots is None or self._ep_size is None:
            raise ValueError("load_balancer: num_slots and setup() are needed first")
        return self.num_slots // self._ep_size

    @property
    def slot_start(self) -> int:
        """First slot of this rank. ValueError before `setup`."""
        return (self._ep_rank or 0) * self.num_local_slots

    @property
    def slot_end(self) -> int:
        """One behind the last slot of this rank. ValueError before `setup`."""
        return self.slot_start + self.num_local_slots

    def get_layer_initial_global_assignments(self, layer_idx: int) -> Optional[List[int]]:
        """The expert of each slot, None for the default. KeyError or ValueError for a wrong layer."""
        if self.initial_global_assignments is None:
            return None
        if layer_idx not in self.initial_global_assignments:
            raise KeyError(f"load_balancer.initial_global_assignments has no layer {layer_idx}")
        assigned = self.initial_global_assignments[layer_idx]
        if len(assigned) != self.num_slots:
            raise ValueError(
                f"load_balancer.initial_global_assignments[{layer_idx}] has {len(assigned)} slots, "
                f"num_slots is {self.num_slots}"
            )
        return assigned
