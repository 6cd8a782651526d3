"""Reads a source tree for the house rules: files, what they import and when, what they say."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "trtllm_r3"
ENGINE = "tensorrt_llm"
TREE = "standin/tree/"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is "a.b.c". `top`: it runs when the module is imported."""

    name: str
    line: int
    top: bool


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the package, with slashes."""

    path: str
    text: str

    @property
    def in_tree(self) -> bool:
        return self.path.startswith(TREE)

    @property
    def module(self) -> str:
        inside = self.path.removeprefix(TREE) if self.in_tree else f"{PACKAGE}/{self.path}"
        return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(self._imports(self.tree, top=True))

    @functools.cached_property
    def functions(self) -> list[Function]:
        return [n for n in ast.walk(self.tree) if isinstance(n, Function)]

    @functools.cached_property
    def strings(self) -> list[tuple[int, str]]:
        """String constants that are no docstrings."""
        prose = {id(first) for node in ast.walk(self.tree) if (first := docstring_node(node))}
        return [
            (n.lineno, n.value)
            for n in ast.walk(self.tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in prose
        ]

    def _imports(self, node: ast.AST, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(a.name, child.lineno, top) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = self._absolute(child)
                yield from (Import(f"{base}.{a.name}", child.lineno, top) for a in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from self._imports(ast.Module(child.body, []), top=False)
                yield from self._imports(ast.Module(child.orelse, []), top=top)
            else:
                yield from self._imports(child, top and not isinstance(child, Function | ast.Lambda))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".")
        if not self.path.endswith("__init__.py"):
            package.pop()
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *filter(None, [node.module])])


def read(package: Path) -> list[Source]:
    """All Python files below a package directory."""
    return [Source(p.relative_to(package).as_posix(), p.read_text()) for p in sorted(package.rglob("*.py"))]


@functools.cache
def house() -> tuple[Source, ...]:
    """The package as it stands."""
    return tuple(read(ROOT / "src" / PACKAGE))


def docstring_node(node: ast.AST) -> ast.Constant | None:
    """The constant that is the docstring of a module, class or function (or follows an assignment)."""
    body = getattr(node, "body", None)
    if not isinstance(node, Documented) or not body or not isinstance(body[0], ast.Expr):
        return None
    value = body[0].value
    return value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def within(name: str, *modules: str) -> bool:
    """Whether a dotted name is one of the modules or lies inside one."""
    return any(name == m or name.startswith(m + ".") for m in modules)
