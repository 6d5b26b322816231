"""The official client runs in a separate environment, named by TINKER_PYTHON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_core.plugins.manager import load_plugins
from tests.tinker.server import CLIENT, TinkerServer, tinker_server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not CLIENT:
            item.add_marker(pytest.mark.skip(reason="needs the official client: `make test-tinker` installs it"))


@pytest.fixture(scope="session")
def tiny() -> str:
    """The directory of the tiny model."""
    return str(load_plugins().resolve_model("tiny", download=False).directory)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Iterator[TinkerServer]:
    with tinker_server(tmp_path_factory.mktemp("tinker"), tiny) as running:
        yield running
