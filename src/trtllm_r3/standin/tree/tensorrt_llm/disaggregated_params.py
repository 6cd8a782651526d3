"""Parameters of disaggregated serving; only whole requests can be served here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bindings.executor import RequestType


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """What a context server hands to a generation server.

    Every `request_type` but "context_and_generation" is refused when the request is made.
    """

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None

    def get_request_type(self) -> RequestType:
        """The bound enum member of `request_type`; ValueError for an unknown one."""
        if self.request_type is None:
            raise ValueError("disaggregated_params.request_type is not set")
        try:
            return RequestType[f"REQUEST_TYPE_{self.request_type.upper()}"]
        except KeyError:
            raise ValueError(f"disaggregated_params.request_type={self.request_type!r} is unknown") from None
