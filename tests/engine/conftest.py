"""Checkpoints that the engine tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_oracle_checkpoint


@pytest.fixture(autouse=True)
def _standin(standin: str) -> None:
    """Every test here runs on the stand-in."""


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The oracle checkpoint and its configuration: L, K and E differ from each other and from every length."""
    path: Path = tmp_path_factory.mktemp("oracle")
    return str(path), write_oracle_checkpoint(path)
