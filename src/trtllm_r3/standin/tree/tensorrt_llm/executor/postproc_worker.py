"""Options of post-processing processes. This engine has none: more than zero workers are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class PostprocArgs:
    """Arguments of a post-processor."""

    first_iteration: bool = True
    num_prompt_tokens: int | None = None
    tokenizer: Any = None


@dataclass(kw_only=True)
class PostprocParams:
    """A post-processor and its arguments."""

    post_processor: Callable[..., Any] | None = None
    postproc_args: PostprocArgs | None = None


@dataclass
class PostprocWorkerConfig:
    """How many post-processing processes there are, and their tokenizer."""

    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether there are any."""
        return self.num_postprocess_workers > 0
