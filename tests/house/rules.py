"""The house rules. Each takes source files and returns what violates it, one line each."""

from __future__ import annotations

import ast
import graphlib
import re
import statistics
import sys
from collections.abc import Iterable, Sequence

from house.source import ENGINE, PACKAGE, Documented, Function, Source, docstring_node, within

STANDIN = f"{PACKAGE}.standin"


# ---- borders ----


def flow_knows_torch_and_numpy_only(files: Iterable[Source]) -> list[str]:
    """No engine, no trainer, of ours nothing but flow, config and errors; kernels has what torch brings on a GPU."""
    ours = [f"{PACKAGE}.{part}" for part in ("flow", "config", "errors")]
    known = {*sys.stdlib_module_names, "torch", "numpy"}
    return [
        f"{f.path}:{i.line} imports {i.name}"
        for f in files
        if f.path.startswith("flow/")
        for i in f.imports
        if i.name.partition(".")[0] not in known and not within(i.name, *ours)
        if not (f.path == "flow/kernels.py" and within(i.name, "triton"))
    ]


def only_trtllm_names_the_engine(files: Sequence[Source]) -> list[str]:
    """By import or in a string. Beside it: _arm, the stand-in, one file of cli that chooses the engine."""
    strangers = [f for f in files if not f.path.startswith(("trtllm/", "standin/")) and f.path != "_arm.py"]
    found = [(f, f"{f.path}:{line} names {what}") for f in strangers for line, what in _mentions(f, ENGINE)]
    return _all_but_one_of_cli(found)


def the_engine_is_never_imported_at_top_level(files: Iterable[Source]) -> list[str]:
    """Outside the stand-in's own tree."""
    return [
        f"{f.path}:{i.line} imports {i.name} at top level"
        for f in files
        if not f.in_tree
        for i in f.imports
        if i.top and within(i.name, ENGINE)
    ]


def the_stand_in_knows_nothing_of_us(files: Iterable[Source]) -> list[str]:
    """It imports nothing of ours, and its tree does not even have our words."""
    imports = [
        f"{f.path}:{i.line} imports {i.name}"
        for f in files
        if f.path.startswith("standin/")
        for i in f.imports
        if within(i.name, PACKAGE) and not within(i.name, STANDIN)
    ]
    words = re.compile(r"trtllm_r3|(?<!n_)routed_experts|\br3\b|routing.replay", re.I)
    said = [f"{f.path} says {m.group()!r}" for f in files if f.in_tree for m in words.finditer(f.text)]
    return imports + said


def nobody_imports_the_stand_in(files: Sequence[Source]) -> list[str]:
    """But _arm, the demo, and the one file of cli that chooses the engine."""
    others = [f for f in files if not f.path.startswith(("standin/", "cli/demo")) and f.path != "_arm.py"]
    found = [(f, f"{f.path}:{line} imports {what}") for f in others for line, what in _mentions(f, STANDIN)]
    return _all_but_one_of_cli(found)


def there_are_no_import_cycles(files: Iterable[Source]) -> list[str]:
    """Among imports that run at import time."""
    known = {f.module for f in files}
    graph = {
        f.module: {m for i in f.imports if i.top and (m := _owner(i.name, known)) != f.module} for f in files
    }
    try:
        graphlib.TopologicalSorter({k: v - {""} for k, v in graph.items()}).prepare()
    except graphlib.CycleError as exc:
        return [" <- ".join(exc.args[1])]
    return []


def _owner(name: str, known: set[str]) -> str:
    candidates = (name, name.rpartition(".")[0])  # a module, or a name in a module
    return next((c for c in candidates if c in known), "")


def _mentions(file: Source, module: str) -> list[tuple[int, str]]:
    imports = [(i.line, i.name) for i in file.imports if within(i.name, module)]
    return imports + [(line, repr(text)) for line, text in file.strings if module in text]


def _all_but_one_of_cli(found: list[tuple[Source, str]]) -> list[str]:
    helpers = {f.path for f, _ in found if f.path.startswith("cli/") and not f.path.startswith("cli/demo")}
    free = helpers if len(helpers) == 1 else set()
    return [line for f, line in found if f.path not in free]


# ---- budgets ----


def files_stay_small(files: Iterable[Source], limit: int = 300) -> list[str]:
    """300 lines are the end."""
    return [f"{f.path}: {n} lines" for f in files if (n := f.text.count("\n")) > limit]


def functions_stay_small(files: Iterable[Source], limit: int = 40) -> list[str]:
    """40 lines without the docstring."""
    return [
        f"{f.path}:{fn.lineno} {fn.name}: {n} lines"
        for f in files
        for fn in f.functions
        if (n := code_lines(fn)) > limit
    ]


def median_function(files: Iterable[Source]) -> float:
    """Median length of all functions, without docstrings."""
    return statistics.median([code_lines(fn) for f in files for fn in f.functions] or [0])


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    doc = docstring_node(function)
    prose = doc.end_lineno - doc.lineno + 1 if doc and doc.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - prose


# ---- manners ----


def public_names_are_documented(files: Iterable[Source]) -> list[str]:
    """Modules, classes and functions; methods too, except in the stand-in's tree, whose names are stock's."""
    return [
        f"{f.path}:{getattr(node, 'lineno', 1)} {name} has no docstring"
        for f in files
        for name, node in _public(f)
        if docstring_node(node) is None
    ]


def _public(file: Source) -> list[tuple[str, Documented]]:
    found: list[tuple[str, Documented]] = (
        [] if file.in_tree or not file.text.strip() else [("module", file.tree)]
    )
    for node in file.tree.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        found.append((node.name, node))
        if isinstance(node, ast.ClassDef) and not file.in_tree:
            methods = [n for n in node.body if isinstance(n, Function) and not n.name.startswith("_")]
            found += [(f"{node.name}.{m.name}", m) for m in methods if not _mere_signature(m)]
    return found


def _mere_signature(method: Function) -> bool:
    """A member of a protocol, or an overload: what it means is said by its class or its implementation."""
    return all(ast.unparse(statement) == "..." for statement in method.body)


def no_fault_is_swallowed(files: Iterable[Source]) -> list[str]:
    """No bare except, no blanket except that does nothing, no blanket suppress."""
    return [
        f"{f.path}:{getattr(n, 'lineno', 0)} {ast.unparse(n).splitlines()[0]}"
        for f in files
        for n in ast.walk(f.tree)
        if _swallows(n)
    ]


def _swallows(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or (_blanket(node.type) and all(_nothing(s) for s in node.body))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return any(_blanket(a) for a in node.args)
    return False


def _blanket(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(ast.unparse(p) in ("Exception", "BaseException") for p in parts)


def _nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass | ast.Continue) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


# ---- traces ----

# The patterns are written so that they do not find themselves.
_TRACES = re.compile(
    r"(?<![\w.-])/(?:wor[k]|opt/de[v]|roo[t]|tmp/[w]|hom[e]/\w+|User[s]/\w+)/"
    r"|https?://[^\s\"')]*(?:pyp[i]|/simpl[e]\b|artifactor[y]|devp[i])"
    r"|(?:index|find)-(?:ur[l]|link[s])"
    r"|\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b"
)


def traces(name: str, text: str) -> list[str]:
    """Paths of a machine, addresses of a package index, words that say something is unfinished."""
    return [
        f"{name}:{number} {m.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for m in _TRACES.finditer(line)
    ]
