"""Which KV blocks hold what: a tree of blocks, each keyed by its tokens under those of its parent."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple


class BlockScope(NamedTuple):
    """What tells equal tokens apart."""

    lora_task_id: int | None = None
    cache_salt_id: int | None = None
    extra_keys: tuple[Hashable, ...] = ()


class BlockKey(NamedTuple):
    """Content of one block; the blocks before it are its ancestors."""

    tokens: tuple[int, ...]
    scope: BlockScope = BlockScope()

    def shared_with(self, other: BlockKey) -> int:
        """Number of leading tokens that are the same."""
        if self.scope != other.scope:
            return 0
        for index, (mine, theirs) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != theirs:
                return index
        return min(len(self.tokens), len(other.tokens))


class KvBlock:
    """A physical block. In the tree if it has a parent; `refs` counts the sequences that use it."""

    __slots__ = ("block_id", "children", "key", "parent", "refs")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.key: BlockKey | None = None
        self.parent: KvBlock | None = None
        self.children: dict[BlockKey, KvBlock] = {}

    def __repr__(self) -> str:
        return f"KvBlock({self.block_id}, refs={self.refs}, key={self.key})"


class Match(NamedTuple):
    """A block and how many leading tokens of the wanted key it holds; `partial`: not a full, equal block."""

    block: KvBlock
    tokens: int
    partial: bool


class KvBlockTree:
    """Finds blocks by content. The first writer of a content keeps its place."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.root = KvBlock(-1)

    def keys(self, tokens: list[int], scope: BlockScope, partial: bool) -> list[BlockKey]:
        """Keys of the blocks of a sequence; the last may be short if `partial`, else it is left out."""
        size = self.tokens_per_block
        end = len(tokens) if partial else len(tokens) // size * size
        starts = range(0, end, size)
        return [BlockKey(tuple(tokens[start : min(start + size, end)]), scope) for start in starts]

    def find(self, parent: KvBlock, key: BlockKey, *, partial: bool, copying: bool) -> Match | None:
        """The child with this key, else (if `partial`) the one that shares most of it.

        Unless `copying`, a partial match must be a leaf that nobody uses, for it is going to be overwritten.
        """
        exact = parent.children.get(key)
        if exact is not None:
            return Match(exact, len(key.tokens), len(key.tokens) < self.tokens_per_block)
        best: Match | None = None
        for child in parent.children.values() if partial else ():
            assert child.key is not None
            shared = child.key.shared_with(key)
            usable = copying or not (child.refs or child.children)
            if usable and shared > (best.tokens if best else 0):
                best = Match(child, shared, True)
        return best

    def store(self, keys: list[BlockKey], blocks: list[KvBlock]) -> None:
        """Enter a sequence's blocks; a content that is there already stays with the block that holds it."""
        parent = self.root
        for key, block in zip(keys, blocks, strict=False):
            found = parent.children.get(key)
            if found is None:
                self.detach(block)
                block.key, block.parent = key, parent
                parent.children[key] = found = block
            parent = found

    def first_unknown(self, keys: list[BlockKey]) -> tuple[BlockKey, ...] | None:
        """Path to the first block of a sequence that the tree lacks, None if it has all."""
        parent = self.root
        for index, key in enumerate(keys):
            found = parent.children.get(key)
            if found is None:
                return tuple(keys[: index + 1])
            parent = found
        return None

    def detach(self, block: KvBlock) -> list[KvBlock]:
        """Take a block and all below it out of the tree; the blocks below."""
        if block.parent is not None:
            assert block.key is not None
            del block.parent.children[block.key]
        below = list(_descendants(block))
        for gone in (block, *below):
            gone.key, gone.parent = None, None
            gone.children = {}
        return below

    def clear(self) -> None:
        """Forget every content."""
        for child in list(self.root.children.values()):
            self.detach(child)


def _descendants(block: KvBlock) -> Iterator[KvBlock]:
    """All below a block; not recursive, a sequence may have thousands of blocks."""
    below = list(block.children.values())
    while below:
        found = below.pop()
        below.extend(found.children.values())
        yield found
