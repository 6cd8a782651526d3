"""The house keeps its rules, and each rule bites when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import rules
from house.source import house, read

RULES = [
    rules.flow_knows_torch_and_numpy_only,
    rules.only_trtllm_names_the_engine,
    rules.the_engine_is_never_imported_at_top_level,
    rules.the_stand_in_knows_nothing_of_us,
    rules.nobody_imports_the_stand_in,
    rules.there_are_no_import_cycles,
    rules.files_stay_small,
    rules.functions_stay_small,
    rules.public_names_are_documented,
    rules.no_fault_is_swallowed,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule):
    assert rule(house()) == []


@pytest.mark.parametrize("in_tree", [False, True], ids=["ours", "stand-in"])
def test_the_median_function_has_at_most_ten_lines(in_tree):
    assert rules.median_function([f for f in house() if f.in_tree is in_tree]) <= 10


def test_few_files_are_longer_than_two_hundred_lines(capsys):
    long = rules.files_stay_small(house(), limit=200)
    with capsys.disabled():
        print(f"\nfiles over 200 lines ({len(long)} of {len(house())}): {', '.join(long) or 'none'}")
    assert len(long) <= len(house()) / 5, long


def broken(tmp_path: Path, files: dict[str, str]) -> list:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read(tmp_path)


DOC = '"""Doc."""\n'

BITES = [
    (rules.flow_knows_torch_and_numpy_only, {"flow/a.py": "import verl"}),
    (rules.flow_knows_torch_and_numpy_only, {"flow/a.py": "def f():\n    from ..trtllm import sites"}),
    (rules.flow_knows_torch_and_numpy_only, {"flow/a.py": "from .. import plugins"}),
    (rules.flow_knows_torch_and_numpy_only, {"flow/a.py": "import pluggy.hooks"}),
    (rules.only_trtllm_names_the_engine, {"flow/a.py": "import tensorrt_llm"}),
    (rules.only_trtllm_names_the_engine, {"export/a.py": "x = __import__('tensorrt_llm.llmapi')"}),
    (rules.only_trtllm_names_the_engine, {f"cli/{n}.py": "def f():\n    import tensorrt_llm" for n in "ab"}),
    (rules.the_engine_is_never_imported_at_top_level, {"trtllm/a.py": "from tensorrt_llm import LLM"}),
    (rules.the_engine_is_never_imported_at_top_level, {"trtllm/a.py": "class A:\n    import tensorrt_llm.x"}),
    (
        rules.the_engine_is_never_imported_at_top_level,
        {"trtllm/a.py": "try:\n    import tensorrt_llm\nfinally: 1"},
    ),
    (rules.the_stand_in_knows_nothing_of_us, {"standin/__init__.py": "from .. import errors"}),
    (rules.the_stand_in_knows_nothing_of_us, {"standin/tree/tensorrt_llm/a.py": "import trtllm_r3"}),
    (rules.the_stand_in_knows_nothing_of_us, {"standin/tree/tensorrt_llm/a.py": "# for R3"}),
    (rules.the_stand_in_knows_nothing_of_us, {"standin/tree/tensorrt_llm/a.py": "x.routed_experts = 1"}),
    (rules.nobody_imports_the_stand_in, {"trtllm/a.py": "def f():\n    from ..standin import install"}),
    (rules.nobody_imports_the_stand_in, {"flow/a.py": "from trtllm_r3 import standin"}),
    (rules.nobody_imports_the_stand_in, {"export/a.py": "import_module('trtllm_r3.standin')"}),
    (rules.nobody_imports_the_stand_in, {f"cli/{n}.py": "from .. import standin" for n in "ab"}),
    (rules.there_are_no_import_cycles, {"a.py": "from . import b", "b.py": "import trtllm_r3.a"}),
    (
        rules.there_are_no_import_cycles,
        {"flow/__init__.py": "from .a import f", "flow/a.py": "from . import g", "b.py": ""},
    ),
    (rules.files_stay_small, {"a.py": "x = 1\n" * 301}),
    (rules.functions_stay_small, {"a.py": "def f():\n" + "    x = 1\n" * 40}),
    (rules.public_names_are_documented, {"a.py": DOC + "def f(): return 1"}),
    (rules.public_names_are_documented, {"a.py": DOC + "class A:\n    x = 1"}),
    (rules.public_names_are_documented, {"a.py": DOC + "class A:\n    'Doc.'\n    def f(self): return 1"}),
    (rules.public_names_are_documented, {"a.py": "x = 1"}),
    (rules.public_names_are_documented, {"standin/tree/tensorrt_llm/a.py": "def f(): return 1"}),
    (rules.no_fault_is_swallowed, {"a.py": "try:\n    f()\nexcept:\n    g()"}),
    (rules.no_fault_is_swallowed, {"a.py": "try:\n    f()\nexcept Exception:\n    pass"}),
    (rules.no_fault_is_swallowed, {"a.py": "try:\n    f()\nexcept (OSError, BaseException) as e:\n    ..."}),
    (rules.no_fault_is_swallowed, {"a.py": "with contextlib.suppress(Exception):\n    f()"}),
]


@pytest.mark.parametrize(("rule", "files"), BITES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_rule_is_found(rule, files, tmp_path):
    assert rule(broken(tmp_path, files))


FINE = [
    (
        rules.flow_knows_torch_and_numpy_only,
        {"flow/a.py": "import math, torch.nn\nfrom ..config import Config"},
    ),
    (rules.only_trtllm_names_the_engine, {"export/a.py": '"""Reads what tensorrt_llm wrote."""'}),
    (rules.only_trtllm_names_the_engine, {"cli/engine.py": "def f():\n    import tensorrt_llm"}),
    (
        rules.the_engine_is_never_imported_at_top_level,
        {
            "trtllm/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tensorrt_llm\n"
            "def f():\n    import tensorrt_llm"
        },
    ),
    (
        rules.nobody_imports_the_stand_in,
        {"cli/engine.py": "from .. import standin", "cli/demo.py": "import trtllm_r3.standin"},
    ),
    (rules.there_are_no_import_cycles, {"a.py": "from . import b", "b.py": "def f():\n    from . import a"}),
    (
        rules.functions_stay_small,
        {"a.py": 'def f():\n    """\n' + "    word\n" * 40 + '    """\n    return 1'},
    ),
    (rules.public_names_are_documented, {"a.py": DOC + "class _A:\n    def f(self): return 1"}),
    (rules.no_fault_is_swallowed, {"a.py": "try:\n    f()\nexcept OSError:\n    pass"}),
    (rules.no_fault_is_swallowed, {"a.py": "try:\n    f()\nexcept Exception as exc:\n    note(exc)"}),
]


@pytest.mark.parametrize(("rule", "files"), FINE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_kept_rule_is_left_in_peace(rule, files, tmp_path):
    assert rule(broken(tmp_path, files)) == []


def test_the_median_counts_every_function(tmp_path):
    files = broken(
        tmp_path, {"a.py": "def f():\n" + "    x = 1\n" * 20 + "class A:\n    async def g(self): return 1"}
    )
    assert rules.median_function(files) == 11
