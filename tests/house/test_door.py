"""The door is light, and behind it are exactly the names that the documents promise."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from types import ModuleType

import pytest
from house.source import PACKAGE, ROOT

PUBLIC = {
    "enable", "disable", "status", "reset", "routes_of", "Routes", "Config", "errors", "__version__",
}  # fmt: skip
HEAVY = ("torch", "tensorrt_llm", "numpy", "transformers", "matplotlib")


def door() -> ModuleType:
    if not (ROOT / "src" / PACKAGE / "__init__.py").exists():
        pytest.skip("the door is not built yet")
    return importlib.import_module(PACKAGE)


def test_importing_the_package_imports_nothing_heavy():
    door()
    code = f"import sys, {PACKAGE}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_the_public_names_are_the_documented_ones():
    assert set(door().__all__) | {"__version__"} == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_public_name_is_there(name):
    assert getattr(door(), name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError):
        door().no_such_name  # noqa: B018


def test_the_version_is_that_of_the_package():
    assert f'version = "{door().__version__}"' in (ROOT / "pyproject.toml").read_text()


def twins() -> dict[str, str]:
    config = importlib.import_module(f"{PACKAGE}.config")
    return {f.name: f.metadata["env"] for f in dataclasses.fields(config.Config)}


def test_each_option_has_a_variable_of_its_own():
    assert len(set(twins().values())) == len(twins())
    assert all(name.startswith("TRTLLM_R3_") for name in twins().values())


def test_each_option_is_documented_with_its_variable():
    pages = [ROOT / "README.md", ROOT / "docs" / "options.md"]
    text = "".join(page.read_text() for page in pages if page.exists())
    if not pages[1].exists() and "TRTLLM_R3_" not in text:
        pytest.skip("no page on options yet")
    assert [pair for pair in twins().items() if not all(f"`{word}`" in text for word in pair)] == []
