"""The clean room: each test leaves the environment and the engine as it found them."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once, when it is imported; worker processes inherit it

import functools
import sys
from collections.abc import Iterator

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, and say so."""
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)


@functools.cache
def _why_no_gpu() -> str:
    try:
        import torch
    except ImportError:
        return "needs torch with CUDA; torch is not installed"
    return "" if torch.cuda.is_available() else f"needs a CUDA device; torch {torch.__version__} sees none"


@pytest.fixture(autouse=True)
def clean_room() -> Iterator[None]:
    """Restore the environment; switch the package off if the test left it on; nothing stays patched."""
    before = dict(os.environ)
    yield
    _restore(before)
    left = _switch_off()
    assert not left, f"still patched after disable(): {left}"


def _restore(before: dict[str, str]) -> None:
    now = dict(os.environ)
    for name in (now.keys() | before.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif now.get(name) != before[name]:
            os.environ[name] = before[name]


def _switch_off() -> list[str]:
    patching = sys.modules.get("trtllm_r3.trtllm.patching")
    if patching is None or not patching.active_patchers():
        return []
    disable = getattr(sys.modules["trtllm_r3"], "disable", None)
    if disable is not None:
        disable()
    left = patching.active_patchers()
    for patcher in left:
        patcher.revert()
    return [p.target.attribute for patcher in left for p in patcher.patches]


@pytest.fixture(scope="session")
def standin() -> str:
    """The stand-in engine is importable as `tensorrt_llm`; the value is its era."""
    from trtllm_r3 import standin

    standin.install()
    era = standin.installed()
    assert era is not None
    return era
