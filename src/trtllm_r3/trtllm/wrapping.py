"""One wrapper on one attribute: how it is put on, and how it comes off again."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from .patch import Placed

_MARK = "_self_trtllm_r3"  # wrapt keeps attributes of this prefix on the proxy itself


class Absent(Exception):
    """The module is there, the attribute is not."""


def put_on(
    module: ModuleType, *, attribute: str, kind: str, wrapper: str, needs: tuple[str, ...] = ()
) -> Placed:
    """Wrap or edit `attribute` of `module`. Raises Absent, or whatever went wrong with the reason in it."""
    owner, name, found = _resolve(module, attribute)
    function = _function(found)
    if needs:
        _check_parameters(function, needs)
    ours = pkgutil.resolve_name(wrapper)
    if kind == "edit":
        return _Edit(found, ours, wrapper)
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"expected a function, found {function!r}")
    return _Wrapping(owner, name, found, kind, ours)


class _Edit:
    """Changes made by a function of ours that also knows how to undo them."""

    def __init__(self, owner: Any, edit: Callable[[Any], Any], label: str) -> None:
        self._owner = owner
        self._undo = edit(owner)
        if not callable(self._undo):
            raise TypeError(f"expected an undo callable from {label}, found {self._undo!r}")

    def off(self) -> None:
        self._undo()

    def covers(self, module: ModuleType, attribute: str) -> bool:
        return _resolve(module, attribute)[2] is self._owner


class _Wrapping:
    """A replaced function. Off means inert, also where somebody else's wrapper keeps it in the chain."""

    def __init__(self, owner: Any, name: str, found: Any, kind: str, wrapper: Callable[..., Any]) -> None:
        self.on = True
        self._owner, self._name = owner, name
        self.original, self.inherited = _skip_inert(found, inherited=name not in vars(owner))
        build = self._plain if kind == "plain" else self._proxy
        self._ours = build(wrapper)
        setattr(self._ours, _MARK, self)
        setattr(owner, name, self._ours)
        if isinstance(owner, ModuleType):
            _rebind(owner, self.original, self._ours)

    def off(self) -> None:
        self.on = False
        original, inherited = _skip_inert(self.original, self.inherited)
        if vars(self._owner).get(self._name) is self._ours:
            if inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, original)
        if isinstance(self._owner, ModuleType):
            _rebind(self._owner, self._ours, original)

    def covers(self, module: ModuleType, attribute: str) -> bool:
        return _resolve(module, attribute)[2] is self._ours

    def holds(self, value: Any) -> bool:
        """Whether `value` is our wrapper itself (functools.wraps copies our mark onto strangers)."""
        return value is self._ours

    def _proxy(self, wrapper: Callable[..., Any]) -> Any:
        return wrapt.FunctionWrapper(self.original, wrapper, lambda: self.on)

    def _plain(self, wrapper: Callable[..., Any]) -> Any:
        original = _function(self.original)
        if inspect.iscoroutinefunction(original) or inspect.isgeneratorfunction(original):
            raise TypeError(f"expected a plain function, found {original!r}")
        replacement = wrapper(original)
        if not callable(replacement):
            raise TypeError(f"expected a function from the wrapper, found {replacement!r}")

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            return (replacement if self.on else original)(*args, **kwargs)

        for binding in (staticmethod, classmethod):
            if isinstance(self.original, binding):
                return binding(ours)
        return ours


def _resolve(module: ModuleType, attribute: str) -> tuple[Any, str, Any]:
    """Owner, last name and the raw value (class dictionaries are read, so that nothing gets bound)."""
    owner, name, value = module, "", module
    for name in filter(None, attribute.split(".")):
        owner, value = value, _raw(value, name)
    return owner, attribute.rpartition(".")[2], value


def _raw(owner: Any, name: str) -> Any:
    for cls in owner.__mro__ if isinstance(owner, type) else ():
        if name in vars(cls):
            return vars(cls)[name]
    try:
        return getattr(owner, name)
    except AttributeError as exc:
        raise Absent(str(exc)) from exc


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _check_parameters(function: Any, needs: tuple[str, ...]) -> None:
    signature = inspect.signature(function)
    lacking = [name for name in needs if name not in signature.parameters]
    if lacking:
        raise TypeError(f"expected parameters {', '.join(needs)}; found {signature}: no {', '.join(lacking)}")


def _skip_inert(value: Any, inherited: bool) -> tuple[Any, bool]:
    """What lies under wrappers of ours that are off, and whether the owner merely inherits it."""
    while True:
        wrapping = getattr(value, _MARK, None)
        if wrapping is None or wrapping.on or not wrapping.holds(value):
            return value, inherited
        value, inherited = wrapping.original, inherited or wrapping.inherited


def _rebind(owner: ModuleType, old: Any, new: Any) -> None:
    """Replace `old` in all modules of the owner's package that took it by `from x import y`."""
    package = owner.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == package or name.startswith(package + ".")):
            space = object.__getattribute__(module, "__dict__")  # a lazy module must not be woken
            for key in [key for key, value in list(space.items()) if value is old]:
                space[key] = new
