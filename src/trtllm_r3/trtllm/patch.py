"""A row of the table of patches, and what became of it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Literal, Protocol


class State(Enum):
    """Where a row of the table stands."""

    WAITING = "waiting"  # none of its modules is imported yet
    APPLIED = "applied"
    ABSENT = "absent"  # a module is imported, the attribute is not in it
    FAILED = "failed"  # something raised, see the reason


Note = tuple[State, str]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One row: what we touch in the engine, with what, and why.

    attribute: dotted path inside the module ("" is the module itself, for edits).
    modules: names the module has had, newest first. The newest that has the attribute is patched, no other.
    wrapper: "package.module:function", imported when a module of the row arrives.
    required: an engine that wants routes is not built without it.
    kind: "function": `wrapper(wrapped, instance, args, kwargs)` runs around it (wrapt);
        "plain": `wrapper(original)` returns a plain function, for what is pickled by reference;
        "edit": `wrapper(owner)` changes a class or module and returns its undo.
    needs: names of parameters that the patched callable must have.
    """

    attribute: str
    modules: tuple[str, ...]
    wrapper: str
    why: str
    required: bool = True
    kind: Literal["function", "plain", "edit"] = "function"
    needs: tuple[str, ...] = ()


class Placed(Protocol):
    """Something of ours that is in place and can be taken away."""

    def off(self) -> None:
        """Take it away. Afterwards the engine behaves as if it had never been there."""

    def covers(self, module: ModuleType, attribute: str) -> bool:
        """Whether this path leads to the object on which this one sits."""


@dataclass(eq=False)
class Patch:
    """A target and what became of it. Only its Patcher writes to it."""

    target: Target
    module: str = ""  # name of the module in which it is applied
    placed: Placed | None = None
    notes: dict[str, Note] = field(default_factory=dict)  # module -> why not there
    busy: bool = False

    @property
    def state(self) -> State:
        """The best that any of its modules offered; a failure outweighs an absence."""
        states = {state for state, _ in self.notes.values()}
        if self.placed is not None:
            return State.APPLIED
        return next((s for s in (State.FAILED, State.ABSENT) if s in states), State.WAITING)

    @property
    def reason(self) -> str:
        """Why it is not applied: one clause for each module that was looked at."""
        if self.placed is not None:
            return ""
        return "; ".join(f"{name}: {text}" for name, (_, text) in self.notes.items() if text)

    def row(self) -> dict[str, str]:
        """All of it as plain text."""
        target = self.target
        return {
            "attribute": target.attribute,
            "module": self.module or target.modules[0],
            "state": self.state.value,
            "reason": self.reason,
            "kind": target.kind,
            "required": "yes" if target.required else "no",
            "wrapper": target.wrapper,
            "why": target.why,
        }

    def wants(self, name: str) -> bool:
        """Whether the module of this name may serve better than what is in place."""
        if self.placed is None:
            return self.notes.get(name, (State.WAITING, ""))[0] is not State.FAILED
        order = self.target.modules
        return order.index(name) < order.index(self.module)
