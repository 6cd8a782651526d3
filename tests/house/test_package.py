"""What a wheel and an editable install put into site-packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from house.source import ROOT

PTH = "trtllm_r3.pth"


def build(kind: str, folder: Path) -> zipfile.ZipFile:
    """What pip has the build backend do, in a process of its own as pip does."""
    pytest.importorskip("hatchling.build")
    code = f"import hatchling.build as b; print(b.build_{kind}({str(folder)!r}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return zipfile.ZipFile(folder / ran.stdout.split()[-1])


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_pth_lands_in_the_root_of_site_packages(kind, tmp_path):
    wheel = build(kind, tmp_path)
    assert wheel.read(PTH) == (ROOT / "src" / PTH).read_bytes()


def test_the_wheel_has_the_whole_package_and_nothing_else(tmp_path):
    names = set(build("wheel", tmp_path).namelist())
    package = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "trtllm_r3").rglob("*.py")}
    assert package <= names
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"trtllm_r3", PTH, "trtllm_r3-0.1.0.dist-info"}
    assert "trtllm_r3/py.typed" in names


def test_the_metadata_says_what_the_documents_say(tmp_path):
    wheel = build("wheel", tmp_path)
    metadata = wheel.read("trtllm_r3-0.1.0.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert {"cli", "dev", "report", "standin", "trtllm"} == set(extras(metadata))
    assert required(metadata) == {"numpy", "pluggy", "torch", "wrapt"}
    entry_points = wheel.read("trtllm_r3-0.1.0.dist-info/entry_points.txt").decode()
    assert "trtllm-r3 = trtllm_r3.cli:main" in entry_points
    assert "trtllm_r3-0.1.0.dist-info/licenses/LICENSE" in wheel.namelist()


def extras(metadata: str) -> list[str]:
    return [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")]


def required(metadata: str) -> set[str]:
    lines = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist: ") and "extra" not in line
    ]
    return {line.removeprefix("Requires-Dist: ").split(">")[0].strip() for line in lines}


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_interpreter_with_the_installed_files_is_armed_at_start(kind, tmp_path):
    """The archive is unpacked into a folder that `site` reads, as an installer would do."""
    site = tmp_path / "site"
    build(kind, tmp_path).extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import sys; print('trtllm_r3._arm' in sys.modules)"
    for value, armed in [("1", "True"), ("", "False")]:
        assert run_python(sys.executable, code, TRTLLM_R3=value) == (armed, "")


@pytest.mark.slow
def test_an_editable_install_arms_and_uninstalls_whole(tmp_path):
    env = tmp_path / "venv"
    venv.create(env, with_pip=True)
    python = str(env / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "-e", str(ROOT)], check=True)
    site = next((env / "lib").glob("python*/site-packages"))
    assert (site / PTH).read_text() == (ROOT / "src" / PTH).read_text()
    code = "import sys; print('trtllm_r3._arm' in sys.modules)"
    assert run_python(python, code, TRTLLM_R3="1") == ("True", "")
    assert run_python(python, code) == ("False", "")
    subprocess.run([*pip, "uninstall", "-y", "trtllm-r3"], check=True)
    assert not (site / PTH).exists()
    assert run_python(python, code, TRTLLM_R3="1") == ("False", "")


def run_python(python: str, code: str, **env: str) -> tuple[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("TRTLLM_R3")}
    ran = subprocess.run(
        [python, "-c", code], env={**kept, **env}, cwd="/", capture_output=True, text=True, check=True
    )
    return ran.stdout.strip(), ran.stderr
