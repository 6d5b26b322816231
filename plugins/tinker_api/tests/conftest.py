"""A real server with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from atropos_core.plugins.manager import load_plugins
from tests.tinker.server import TinkerServer, tinker_server


@pytest.fixture(scope="session")
def tiny() -> str:
    return str(load_plugins().resolve_model("tiny", download=False).directory)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Iterator[TinkerServer]:
    with tinker_server(tmp_path_factory.mktemp("tinker"), tiny, "--body-mb", "8") as running:
        yield running
