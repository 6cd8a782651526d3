"""KV blocks of the engine: their ids, and what besides the tokens keys their content."""

from __future__ import annotations

import os
from typing import Any

_KV_CACHE_MANAGER = "KV_CACHE_MANAGER"


class KvBlocks:
    """The KV cache manager of one executor, if its block ids name content (the V1 manager's do).

    V1 ids survive a move to host memory and are recycled only after the content was evicted. The page
    indices of the V2 manager change while the content stays, so they name nothing.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.tokens_per_block = int(manager.tokens_per_block)
        primary = int(manager.blocks_in_primary_pool)
        self.count = primary + int(getattr(manager, "blocks_in_secondary_pool", 0) or 0)

    @classmethod
    def of(cls, managers: Any) -> KvBlocks | None:
        """None if nothing is reused, or nobody can tell what."""
        manager = _kv_cache_manager(managers)
        # With several windows, or one that is shorter than a sequence, a block list is not the sequence.
        windows = getattr(manager, "max_attention_window_vec", None) or [getattr(manager, "max_seq_len", 0)]
        one_window = len(windows) == 1 and windows[0] >= getattr(manager, "max_seq_len", 0)
        names = ("get_cache_indices", "tokens_per_block", "blocks_in_primary_pool")
        known = all(hasattr(manager, name) for name in names) and "V2" not in type(manager).__name__
        reuses = bool(getattr(manager, "enable_block_reuse", False))
        return cls(manager) if known and reuses and one_window else None

    def ids(self, request: Any) -> list[int]:
        """Block ids of a request, in the order of its tokens."""
        return list(self.manager.get_cache_indices(request))

    def scope(self, request: Any) -> bytes:
        """LoRA adapter and cache salt. A prompt with images is like no other: its tokens do not tell."""
        if getattr(request, "py_multimodal_data", None) or getattr(request, "multimodal_hashes", None):
            return os.urandom(16)
        return repr(
            (getattr(request, "lora_task_id", None), getattr(request, "cache_salt_id", None))
        ).encode()


def pool_tokens(managers: Any) -> int:
    """Tokens that the KV cache holds, 0 if it does not say."""
    manager = _kv_cache_manager(managers)
    return int(getattr(manager, "tokens_per_block", 0)) * int(getattr(manager, "blocks_in_primary_pool", 0))


def _kv_cache_manager(managers: Any) -> Any:
    return next((m for key, m in managers.items() if getattr(key, "name", key) == _KV_CACHE_MANAGER), None)
