"""Parameters of a step that several metadata classes share."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class KVCacheParams:
    """How a step uses the KV cache.

    `num_cached_tokens_per_seq[i]` tokens of sequence i are in the cache before the step, so that its
    first new token has that position.
    """

    use_cache: bool = True
    num_cached_tokens_per_seq: list[int] = field(default_factory=list)
    block_ids_per_seq: list[list[int]] | None = None
