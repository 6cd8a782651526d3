"""Applies a table of patches to modules that are imported in any order, reports on them, takes them back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType

import wrapt

from .patch import Note, Patch, Placed, State, Target
from .wrapping import Absent, put_on

__all__ = ["Patch", "Patcher", "State", "Target", "active_patchers"]


class Patcher:
    """Owns every patch of its table, and nothing else. `apply` and `revert` may alternate freely."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self.patches = [Patch(target) for target in targets]
        self._active = False
        self._switch = threading.RLock()  # one apply or revert at a time; no import hook takes it
        self._lock = threading.Lock()  # guards the patches; never held while foreign code runs

    def __enter__(self) -> Patcher:
        self.apply()
        return self

    def __exit__(self, *exc: object) -> None:
        self.revert()

    def apply(self) -> None:
        """Patch what is imported, and the rest when it arrives. Never raises; doing it again is harmless."""
        with self._switch:
            self._active = True
            _active[id(self)] = self
            for name in dict.fromkeys(n for patch in self.patches for n in patch.target.modules):
                _listen(name)
            self._settle()

    def revert(self) -> None:
        """Take everything back. What a stranger's wrapper holds in place stays there and does nothing."""
        with self._switch:
            with self._lock:
                self._active = False
                _active.pop(id(self), None)
            for patch in reversed(self.patches):
                self._clear(patch)

    def missing(self, *, include_waiting: bool = False) -> list[Patch]:
        """Required patches that are not applied though a module of theirs is imported (or all of them)."""
        self._settle()
        fine = {State.APPLIED} if include_waiting else {State.APPLIED, State.WAITING}
        return [p for p in self.patches if p.target.required and p.state not in fine]

    def report(self) -> list[dict[str, str]]:
        """One row of plain text for each patch, in the order of the table."""
        self._settle()
        return [patch.row() for patch in self.patches]

    def arrived(self, name: str, module: ModuleType) -> None:
        """Called after an import. Never raises: wrapt would forget the hook, and the import would break."""
        for patch in self.patches:
            if name in patch.target.modules:
                self._attempt(patch, name, module)

    def _settle(self) -> None:
        """Look once more at what was half imported, absent or busy when we looked last."""
        for patch in self.patches:
            for name, module in _imported(patch.target.modules):
                self._attempt(patch, name, module)

    def _attempt(self, patch: Patch, name: str, module: ModuleType) -> None:
        with self._lock:
            if not self._active or patch.busy or not patch.wants(name):
                return
            patch.busy = True
        placed: Placed | None = None
        note = (State.FAILED, "interrupted")
        try:
            placed, note = _try(patch, module)
        finally:
            late = self._record(patch, name, placed, note)
        if late is not None:
            late.off()

    def _record(self, patch: Patch, name: str, placed: Placed | None, note: Note) -> Placed | None:
        """Store the outcome of an attempt; return what has to come off: the superseded, or one too late."""
        with self._lock:
            patch.busy = False
            if placed is None or not self._active:
                patch.notes[name] = note
                return placed
            late, patch.placed, patch.module = patch.placed, placed, name
            return late

    def _clear(self, patch: Patch) -> None:
        with self._lock:
            placed, name = patch.placed, patch.module
            patch.placed, patch.module = None, ""
            patch.notes.clear()
        try:
            if placed is not None:
                placed.off()
        except Exception as exc:
            patch.notes[name] = (State.FAILED, f"not undone: {exc!r}")


def active_patchers() -> list[Patcher]:
    """Patchers that are applied and not reverted in this process."""
    return list(_active.values())


_active: dict[int, Patcher] = {}
_listening: set[str] = set()


def _listen(name: str) -> None:
    """One hook a name for all patchers: wrapt keeps hooks until the import, whatever becomes of us."""
    if name in sys.modules or name in _listening:
        return
    _listening.add(name)
    # No lock of ours is held here: older wrapt runs hooks under its own.
    try:
        wrapt.register_post_import_hook(_dispatch, name)
    except KeyError:  # wrapt < 1.15 and a module that was imported once and removed: `_settle` will see it
        _listening.discard(name)


def _dispatch(module: ModuleType) -> None:
    _listening.discard(module.__name__)
    for patcher in active_patchers():
        patcher.arrived(module.__name__, module)


def _imported(names: tuple[str, ...]) -> Iterator[tuple[str, ModuleType]]:
    for name in names:
        module = sys.modules.get(name)
        # A module that is still running its body says nothing yet about what it lacks.
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            yield name, module


def _try(patch: Patch, module: ModuleType) -> tuple[Placed | None, Note]:
    target, nothing = patch.target, (State.WAITING, "")
    try:
        if patch.placed is not None and patch.placed.covers(module, target.attribute):
            return None, nothing
        placed = put_on(
            module, attribute=target.attribute, kind=target.kind, wrapper=target.wrapper, needs=target.needs
        )
    except Absent as exc:
        return None, (State.ABSENT, str(exc))
    except Exception as exc:
        return None, (State.FAILED, f"{type(exc).__name__}: {exc}")
    return placed, nothing
