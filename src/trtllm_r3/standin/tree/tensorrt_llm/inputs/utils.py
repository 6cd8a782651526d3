"""Small helpers on inputs."""

from __future__ import annotations

import hashlib


def get_cache_salt_id(cache_salt: str) -> int:
    """A 64-bit number for a salt: requests with different salts share no KV-cache blocks.

    ValueError for a salt whose number would be 0, which means "no salt".
    """
    salt_id = int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "big")
    if salt_id == 0:
        raise ValueError(f"cache_salt {cache_salt!r} cannot be used, choose another")
    return salt_id
