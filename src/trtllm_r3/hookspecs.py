"""The contract with plug-ins (pluggy; entry-point group `trtllm_r3`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from .flow.routes import Routes

hookspec = pluggy.HookspecMarker("trtllm_r3")
hookimpl = pluggy.HookimplMarker("trtllm_r3")


@hookspec
def trtllm_r3_targets() -> list[Any]:
    """Further patch rows (`trtllm_r3.trtllm.patching.Target`) for an engine that differs from stock."""
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def trtllm_r3_site_verdict(site: Any) -> str | None:
    """Judge a MoE layer (`trtllm_r3.trtllm.sites.Site`): "" = its routing is heard, any other text = the
    reason to refuse it, None = no opinion. The first opinion counts; coverage is still checked."""
    raise AssertionError("a specification is never called")


@hookspec
def trtllm_r3_finished(request_id: int, index: int, routes: Routes) -> None:
    """A sequence is finished, on the caller's side. Runs on the thread that handles responses."""
    raise AssertionError("a specification is never called")
