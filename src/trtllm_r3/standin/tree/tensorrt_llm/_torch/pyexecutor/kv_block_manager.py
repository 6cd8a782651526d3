"""Hands out KV blocks to sequences, and keeps the content of freed ones for later sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from .kv_block_tree import BlockKey, BlockScope, KvBlock, KvBlockTree


class OutOfBlocks(RuntimeError):
    """No free KV block is left: the scheduler admitted too much."""


class KvSequence:
    """Blocks of one request: `num_tokens` slots are in use, `scope` keys its content.

    `computed` leading tokens have their KV in the blocks once the launched steps are done. After a reset of
    the reuse state its content is not `storable` any more.
    """

    def __init__(self, scope: BlockScope) -> None:
        self.scope = scope
        self.blocks: list[KvBlock] = []
        self.num_tokens = 0
        self.computed = 0
        self.reused_blocks = 0
        self.storable = True


class KvBlockManager:
    """Blocks of one pool. Free blocks stay findable by content until they are needed (leaves first, least
    recently freed first).

    `copy_block(source, target, tokens)` copies leading tokens of all layers.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        copy_block: Callable[[int, int, int], None],
        *,
        enable_reuse: bool = True,
        enable_partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.enable_reuse = enable_reuse
        self._partial, self._copying = enable_partial_reuse, copy_on_partial_reuse
        self._copy_block = copy_block
        self.tree = KvBlockTree(tokens_per_block)
        self.blocks = [KvBlock(index) for index in range(num_blocks)]
        self._free: OrderedDict[int, KvBlock] = OrderedDict((b.block_id, b) for b in self.blocks)
        self.sequences: dict[int, KvSequence] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses, those with findable content included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that so many tokens take."""
        return -(-num_tokens // self.tokens_per_block)

    def add_sequence(
        self, request_id: int, num_tokens: int, tokens: list[int] | None, scope: BlockScope
    ) -> int:
        """Take blocks for a prompt of `num_tokens`; the number of its tokens whose KV is there already.

        `tokens` None: nothing is looked up. The last token is never found, for it has to be computed.
        ValueError if the request has a sequence, OutOfBlocks if there are too few blocks.
        """
        if request_id in self.sequences:
            raise ValueError(f"request {request_id} has a KV sequence already")
        sequence = self.sequences[request_id] = KvSequence(scope)
        found = 0
        if tokens is not None and self.enable_reuse:
            found = self._reuse(sequence, self.tree.keys(tokens[: num_tokens - 1], scope, partial=True))
        sequence.reused_blocks = len(sequence.blocks)
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing > len(self._free):
            self.remove_sequence(request_id)
            raise OutOfBlocks(f"{missing} KV blocks wanted, fewer of {len(self.blocks)} are free")
        for _ in range(missing):
            self._append_free(sequence)
        sequence.num_tokens = num_tokens
        return found

    def add_token(self, request_id: int) -> None:
        """Room for one more token."""
        sequence = self.sequences[request_id]
        if self.blocks_for(sequence.num_tokens + 1) > len(sequence.blocks):
            self._append_free(sequence)
        sequence.num_tokens += 1
        sequence.computed = sequence.num_tokens

    def store(self, request_id: int, tokens: list[int], partial: bool) -> None:
        """Make the blocks that hold `tokens` findable; a last, short one only if `partial`."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.storable and self.enable_reuse:
            self.tree.store(self.tree.keys(tokens, sequence.scope, partial), sequence.blocks)

    def remove_sequence(self, request_id: int) -> None:
        """Give the blocks back, the last ones to be taken first; does nothing for an unknown request."""
        sequence = self.sequences.pop(request_id, None)
        for block in reversed(sequence.blocks if sequence else []):
            self._unref(block)

    def find_new_context_block(self, tokens: list[int], scope: BlockScope) -> tuple[BlockKey, ...] | None:
        """Path to the first full block of a prompt that is not findable yet."""
        return self.tree.first_unknown(self.tree.keys(tokens, scope, partial=False))

    def reset_reuse_state(self) -> None:
        """Forget all contents; sequences keep their blocks, whose content is never stored again."""
        self.tree.clear()
        for sequence in self.sequences.values():
            sequence.storable = False

    def _reuse(self, sequence: KvSequence, keys: list[BlockKey]) -> int:
        """Take the blocks that hold the leading tokens; how many tokens these are."""
        found, parent = 0, self.tree.root
        for key in keys:
            match = self.tree.find(parent, key, partial=self._partial, copying=self._copying)
            if match is None or (match.partial and not self._partial):
                break
            if match.partial:
                return found + self._take_partial(sequence, match.block, match.tokens)
            self._claim(sequence, match.block)
            found, parent = found + match.tokens, match.block
        return found

    def _take_partial(self, sequence: KvSequence, block: KvBlock, tokens: int) -> int:
        """Make a block whose leading tokens fit the sequence's own: by taking it over, or by a copy."""
        if not block.refs and not block.children:
            self.tree.detach(block)
            self._claim(sequence, block)
            return tokens
        if not self._copying:
            return 0
        block.refs += 1  # the source must not be handed out as the target
        self._free.pop(block.block_id, None)
        copied = tokens if self._free else 0
        if copied:
            self._append_free(sequence)
            self._copy_block(block.block_id, sequence.blocks[-1].block_id, copied)
        self._unref(block)
        return copied

    def _unref(self, block: KvBlock) -> None:
        block.refs -= 1
        if not block.refs:
            self._release(block)

    def _claim(self, sequence: KvSequence, block: KvBlock) -> None:
        self._free.pop(block.block_id, None)
        block.refs += 1
        sequence.blocks.append(block)

    def _append_free(self, sequence: KvSequence) -> None:
        if not self._free:
            raise OutOfBlocks(f"no free KV block of {len(self.blocks)} is left")
        leaf = next((block for block in self._free.values() if not block.children), None)
        block = leaf or next(iter(self._free.values()))
        for below in self.tree.detach(block):
            if not below.refs:
                self._free.move_to_end(below.block_id, last=False)
        self._claim(sequence, block)

    def _release(self, block: KvBlock) -> None:
        self._free[block.block_id] = block
        if block.key is None:
            self._free.move_to_end(block.block_id, last=False)
