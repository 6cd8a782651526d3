"""The ranks of one engine."""

from __future__ import annotations

from typing import TypeVar

from ..._utils import mpi_comm
from ...mapping import Mapping

T = TypeVar("T")


class Distributed:
    """Collectives among the ranks of a mapping. ValueError for more ranks than there are processes."""

    def __init__(self, mapping: Mapping) -> None:
        if mapping.world_size != mpi_comm().Get_size():
            raise ValueError(
                f"world_size={mapping.world_size} is not supported: there is {mpi_comm().Get_size()} rank"
            )
        self.mapping = mapping

    @classmethod
    def get(cls, mapping: Mapping) -> Distributed:
        """The communicator of a mapping."""
        return cls(mapping)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mapping.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mapping.world_size

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.mapping.tp_size

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.mapping.tp_rank

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.mapping.pp_size

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.mapping.cp_size

    def barrier(self) -> None:
        """Wait for all ranks."""
        mpi_comm().barrier()

    def broadcast(self, obj: T, root: int = 0) -> T:
        """`obj` of rank `root`."""
        return mpi_comm().allgather(obj)[root]

    def tp_allgather(self, obj: T) -> list[T]:
        """`obj` of each tensor-parallel rank."""
        return mpi_comm().allgather(obj)

    def tp_gather(self, obj: T) -> list[T]:
        """`obj` of each tensor-parallel rank, on its first rank."""
        return mpi_comm().allgather(obj)
