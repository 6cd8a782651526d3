"""Every test here needs a CUDA device and runs the stand-in on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_oracle_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _standin(standin: str) -> None:
    """The stand-in is installed."""


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("oracle")
    return str(path), write_oracle_checkpoint(
        path, num_hidden_layers=9, num_experts=64, num_experts_per_tok=6
    )
