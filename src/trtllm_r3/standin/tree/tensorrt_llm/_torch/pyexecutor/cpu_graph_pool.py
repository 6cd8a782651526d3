"""Memory that graphs on CPU share: blocks that are poisoned and reused once nobody refers to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0x7F
"""Each byte of memory that was released."""

_GRANULE = 512


def storage_key(tensor: torch.Tensor) -> int:
    """What tensors over the same storage have in common, unique while the storage is known to somebody."""
    return int(tensor.untyped_storage()._cdata)


class _Block:
    """Memory of a pool; `storage` is how recordings see it, users get storages of their own."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8).numpy()
        self.storage = self.fresh_storage()
        self.poison()

    def fresh_storage(self) -> torch.UntypedStorage:
        return torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()

    def poison(self) -> None:
        self._memory.fill(POISON)


class _Live(NamedTuple):
    """A storage that somebody may still hold, where it lies, and in which recording it came up."""

    ref: StorageWeakRef
    block: _Block
    owner: object


class CpuGraphPool:
    """Memory that recordings share; a graph made with a pool uses and extends it."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._live: dict[int, _Live] = {}

    def release(self) -> None:
        """Poison and take back the memory of all storages that nobody refers to any more."""
        for key in [key for key, live in self._live.items() if live.ref.expired()]:
            block = self._live.pop(key).block
            block.poison()
            self._free.append(block)

    def allocate(self, nbytes: int, owner: object) -> torch.UntypedStorage:
        """A storage of at least `nbytes`, in the smallest free block that holds it or in a new one."""
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda one: one.nbytes)
            self._free.remove(block)
        else:
            block = _Block(-(-nbytes // _GRANULE) * _GRANULE)
        storage = block.fresh_storage()
        self._live[storage._cdata] = _Live(StorageWeakRef(storage), block, owner)
        return storage

    def block_of(self, tensor: torch.Tensor, owner: object) -> _Block | None:
        """Where a tensor lies that came up in the recording `owner`, else None."""
        live = self._live.get(storage_key(tensor))
        return live.block if live is not None and live.owner is owner else None
