"""What the README shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from house.source import ROOT

from trtllm_r3.cli.demo_model import build_checkpoint

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    return [text for name, text in found if name == language]


def test_it_fits_on_150_lines():
    assert README.count("\n") <= 150


def test_the_twelve_lines_print_what_they_are_said_to_print(tmp_path):
    [code], [printed] = blocks("python"), blocks("")
    assert len(code.splitlines()) <= 12
    build_checkpoint(tmp_path / "demo" / "model")
    (tmp_path / "lines.py").write_text(code)
    ran = subprocess.run(
        [sys.executable, "lines.py"],
        cwd=tmp_path,
        env={**os.environ, "TLLM_WORKER_USE_SINGLE_PROCESS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert shape(ran.stdout) == shape(printed)


def shape(text: str) -> str:
    """Without the numbers, which depend on Python's help pages."""
    return re.sub(r"\s*\d+", " 0", text)


def test_each_file_that_it_links_to_is_there():
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if not t.startswith("http")]
    assert len(targets) > 8
    assert [t for t in targets if not (ROOT / t).exists()] == []
