"""Nothing that we ship tells where or how far it was made."""

from __future__ import annotations

import subprocess

import pytest
from house.rules import traces
from house.source import ROOT


def shipped() -> list[str]:
    """Files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_shipped_file_carries_traces():
    found = []
    for name in shipped():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            found += traces(name, data.decode())
    assert found == []


@pytest.mark.parametrize(
    "halves",  # so that this file carries none
    [
        ("path = '/ho", "me/someone/src'"),
        ("see /wo", "rk/shared/x.md"),
        ("pip install --index-u", "rl x"),
        ("https://py", "pi.example.org/x"),
        ("# TO", "DO: later"),
        ("FIX", "ME"),
    ],
)
def test_a_trace_is_found(halves):
    assert traces("x", "".join(halves))


@pytest.mark.parametrize("line", ["a framework/root/thing", "https://arxiv.org/abs/2510.11370", "todos = []"])
def test_plain_text_is_no_trace(line):
    assert not traces("x", line)


def test_the_license_is_apache_2_whole_and_declared():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text()
