"""Loads plug-ins once a process."""

from __future__ import annotations

import functools

import pluggy

from . import hookspecs


@functools.cache
def manager() -> pluggy.PluginManager:
    """The plugin manager with everything that the entry-point group `trtllm_r3` offers."""
    found = pluggy.PluginManager("trtllm_r3")
    found.add_hookspecs(hookspecs)
    found.load_setuptools_entrypoints("trtllm_r3")
    return found
