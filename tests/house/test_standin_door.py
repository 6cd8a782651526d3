"""The stand-in is found by its stock name, and refuses to stand in where it must not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from trtllm_r3 import standin


@pytest.fixture
def off_path(monkeypatch):
    """The stand-in as in a fresh process."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != standin._TREE])
    monkeypatch.setattr(standin, "_era", None)
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)
    if importlib.util.find_spec("tensorrt_llm"):
        pytest.skip("stock TensorRT-LLM is installed here")


def test_installed_tells_the_era(off_path):
    assert standin.installed() is None
    standin.install("1.2")
    assert standin.installed() == "1.2"


def test_the_engine_is_found_in_the_tree_and_gone_afterwards(off_path):
    standin.install()
    spec = importlib.util.find_spec("tensorrt_llm")
    assert spec.origin.startswith(standin._TREE)
    standin.uninstall()
    assert importlib.util.find_spec("tensorrt_llm") is None
    assert standin.installed() is None


def test_installing_twice_is_harmless(off_path):
    standin.install()
    standin.install()
    assert sys.path.count(standin._TREE) == 1


def test_an_unknown_era_is_refused_with_the_known_ones(off_path):
    with pytest.raises(standin.StandInUnavailable, match=r"no stand-in for era '0\.9'; there are: 1\.2"):
        standin.install("0.9")
    assert standin.installed() is None


def test_a_second_era_is_refused(off_path, monkeypatch):
    monkeypatch.setattr(standin, "ERAS", ("1.2", "1.1"))
    standin.install("1.2")
    with pytest.raises(standin.StandInUnavailable, match=r"found '1\.2' installed"):
        standin.install("1.1")


def test_stock_beside_it_is_refused(off_path, monkeypatch, tmp_path):
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(standin.StandInUnavailable, match=f"found it installed from {tmp_path}"):
        standin.install()


def test_stock_already_imported_is_refused(off_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    with pytest.raises(standin.StandInUnavailable, match="already imported"):
        standin.install()


def test_an_empty_folder_of_that_name_is_not_stock(off_path, monkeypatch, tmp_path):
    (tmp_path / "tensorrt_llm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    standin.install()
    assert importlib.util.find_spec("tensorrt_llm").origin.startswith(standin._TREE)


def test_a_lacking_dependency_is_named_with_the_remedy(off_path, monkeypatch):
    monkeypatch.setattr(standin, "_NEEDS", ("torch", "no_such_package"))
    with pytest.raises(standin.StandInUnavailable) as caught:
        standin.install()
    assert str(caught.value) == 'no_such_package not installed: pip install "trtllm-r3[standin]"'


def test_installing_imports_nothing_heavy():
    code = "import sys, trtllm_r3.standin as s; s.install(); print('torch' in sys.modules, s.installed())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "1.2"]
