"""What happens at interpreter start, and at the first import of the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest
from house.source import ROOT

from trtllm_r3 import _arm, standin

PTH = (ROOT / "src" / "trtllm_r3.pth").read_text()
PACKAGES = sysconfig.get_path("purelib")
PATHS = f"import sys; sys.path += [{str(ROOT / 'src')!r}, {PACKAGES!r}]"


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Runs code in a fresh interpreter without site-packages that begins with our line of the .pth file.

    The package on its path is a small one of the same name with the real `_arm` and stand-in door, so that
    what `enable()` does can be chosen; `tensorrt_llm` is a small package too, unless `stock` is False.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def run(code, *, enable="print('enabled')", stock=True, package=True, **env):
        if package:
            write(tmp_path / "trtllm_r3" / "__init__.py", f"def enable():\n    {enable}\n")
            write(tmp_path / "trtllm_r3" / "_arm.py", (ROOT / "src/trtllm_r3/_arm.py").read_text())
            write(tmp_path / "trtllm_r3" / "standin" / "__init__.py", OPEN_DOOR)
            write(
                tmp_path / "trtllm_r3" / "standin" / "tree" / "tensorrt_llm" / "__init__.py",
                "print('stand-in')",
            )
        if stock:
            write(tmp_path / "tensorrt_llm" / "__init__.py", "print('engine')")
            write(tmp_path / "tensorrt_llm" / "llmapi.py", "print('llmapi')")
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TRTLLM_R3")}
        ran = subprocess.run(
            [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PTH}\n{code}"],
            env={**kept, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.stdout.split(), ran.stderr

    return run


OPEN_DOOR = """
import os, sys
def install(era):
    if era != "1.2":
        raise RuntimeError(f"no stand-in for {era}")
    sys.path.append(os.path.join(os.path.dirname(__file__), "tree"))
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_pth_is_one_line_that_site_will_execute():
    assert PTH.count("\n") == 1
    assert PTH.startswith("import ")


def test_without_the_variables_nothing_is_imported(python):
    code = "print('trtllm_r3' in sys.modules); import tensorrt_llm"
    assert python(code) == (["False", "engine"], "")


def test_it_is_armed_before_the_engine_is_imported(python):
    assert python("print('start'); import tensorrt_llm", TRTLLM_R3="1") == (
        ["start", "enabled", "engine"],
        "",
    )


def test_a_submodule_arms_too_and_once(python):
    code = "import tensorrt_llm.llmapi, tensorrt_llm"
    assert python(code, TRTLLM_R3="true") == (["enabled", "engine", "llmapi"], "")


@pytest.mark.parametrize("value", ["0", "", "off", "False"])
def test_off_is_off(python, value):
    assert python("import tensorrt_llm; print(len(sys.meta_path))", TRTLLM_R3=value)[0][0] == "engine"


def test_looking_for_the_engine_arms_as_well(python):
    code = "from importlib.util import find_spec; print(find_spec('tensorrt_llm').name)"
    assert python(code, TRTLLM_R3="on") == (["enabled", "tensorrt_llm"], "")


def test_the_stand_in_is_installed_and_then_enable_is_called(python):
    out, err = python("import tensorrt_llm", stock=False, TRTLLM_R3="1", TRTLLM_R3_STANDIN="1.2")
    assert (out, err) == (["enabled", "stand-in"], "")


def test_the_stand_in_works_without_the_switch(python):
    assert python("import tensorrt_llm", stock=False, TRTLLM_R3_STANDIN="1.2") == (["stand-in"], "")


def test_an_engine_that_is_not_there_is_the_usual_error(python):
    out, err = python("import tensorrt_llm", stock=False, TRTLLM_R3="1")
    assert out == ["enabled"]
    assert err.rstrip().endswith("ModuleNotFoundError: No module named 'tensorrt_llm'")


def test_faults_are_one_line_on_stderr_and_the_import_goes_on(python):
    out, err = python(
        "import tensorrt_llm; from trtllm_r3 import _arm; print(len(_arm.errors))",
        enable="raise ValueError('bad option')",
        TRTLLM_R3="1",
        TRTLLM_R3_STANDIN="7",
    )
    assert out == ["engine", "2"]
    assert err == (
        "trtllm-r3: this process is not armed: RuntimeError: no stand-in for 7; ValueError: bad option\n"
    )


def test_a_hook_on_the_engine_itself_that_enable_adds_is_seen(python):
    """The finder that enable() puts first on sys.meta_path takes part in the import that fired it."""
    hook = "wrapt.register_post_import_hook(lambda m: print('hook'), 'tensorrt_llm')"
    enable = f"import sys; sys.path.append({PACKAGES!r}); import wrapt; {hook}"
    assert python("import tensorrt_llm", enable=enable, TRTLLM_R3="1") == (["engine", "hook"], "")


def test_a_package_that_is_gone_leaves_the_interpreter_silent(python):
    out = python("print('fine')", package=False, stock=False, TRTLLM_R3="1")
    assert out == (["fine"], "")


def test_arming_twice_is_arming_once(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(os.environ, "TRTLLM_R3", "1")
    for name in [n for n in sys.modules if n.partition(".")[0] == _arm.ENGINE]:
        monkeypatch.delitem(sys.modules, name)
    before = len(sys.meta_path)
    _arm.arm()
    _arm.arm()
    assert len(sys.meta_path) == before + 1


def test_start_up_imports_neither_wrapt_nor_torch_nor_numpy():
    heavy = ("wrapt", "torch", "numpy", "pluggy", "tensorrt_llm")
    code = (
        f"{PATHS}\n{PTH}\nprint(*[m for m in {heavy!r} if m in sys.modules], 'trtllm_r3._arm' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "TRTLLM_R3": "1", "TRTLLM_R3_STANDIN": standin.ERAS[0]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ran.stdout.split(), ran.stderr) == (["True"], "")
