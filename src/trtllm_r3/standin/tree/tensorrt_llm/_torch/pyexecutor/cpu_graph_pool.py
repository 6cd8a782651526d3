"""Memory of recordings on CPU, recycled and overwritten as the allocator of a CUDA graph would."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

_ALIGNMENT = 64  # as torch's own allocator, so that kernels take the same paths
_POISON = 0x7F  # huge as a float, far outside any vocabulary as an int


class PoolBlock:
    """A piece of memory that never moves. At most one live tensor storage uses it at a time."""

    def __init__(self, nbytes: int) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self.array = self.memory.numpy()
        self.nbytes = nbytes
        self.poison()

    def poison(self) -> None:
        """Overwrite the content. Numpy does it, for this may run amid a recording."""
        self.array.fill(_POISON)

    def alias(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor over this memory with the layout of `like`, which keeps no user's storage alive."""
        flat = self.memory.view(like.dtype)
        return flat.as_strided(like.size(), like.stride(), like.storage_offset())

    def lend(self, like: torch.Tensor, on_return: Callable[[PoolBlock], None]) -> torch.Tensor:
        """As `alias`, but with a storage of its own; `on_return` is called when nobody holds it any more."""
        lease = self.array.view()
        weakref.finalize(lease, on_return, self).atexit = False
        flat = torch.from_numpy(lease).view(like.dtype)
        return flat.as_strided(like.size(), like.stride(), like.storage_offset())


class CpuGraphPool:
    """Blocks that recordings share. A block whose storage expired backs later storages, of any recording.

    `on_release` is told of each release, before the block can be lent again.
    """

    def __init__(self) -> None:
        self.on_release: Callable[[PoolBlock], None] | None = None
        self._free: list[PoolBlock] = []
        self._by_address: dict[int, PoolBlock] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._by_address.values())

    def block_of(self, tensor: torch.Tensor) -> PoolBlock | None:
        """The block that holds a tensor, None for a tensor from elsewhere."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def place(self, tensor: torch.Tensor, copy: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Move a tensor into the pool: (the user's, the recording's) view of the new place."""
        block = self._take(tensor.untyped_storage().nbytes())
        mine = block.alias(tensor)
        if copy:
            mine.copy_(tensor)
        return block.lend(tensor, self._take_back), mine

    def _take(self, nbytes: int) -> PoolBlock:
        fitting = [block for block in self._free if nbytes <= block.nbytes <= max(2 * nbytes, _ALIGNMENT)]
        if fitting:
            block = min(fitting, key=lambda b: b.nbytes)
            self._free.remove(block)
            return block
        block = PoolBlock(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._by_address[block.memory.data_ptr()] = block
        return block

    def _take_back(self, block: PoolBlock) -> None:
        block.poison()
        if self.on_release is not None:
            self.on_release(block)
        self._free.append(block)
