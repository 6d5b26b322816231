"""atroposlib's clients are run by the Python of an environment of their own; the server is ours, or theirs beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.atroposlib.processes import OurServer, Process, TheirServer
from tests.atroposlib.scripted import ScriptedServer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "ATROPOSLIB_PYTHON" not in os.environ:
        skip = pytest.mark.skip(reason="needs atroposlib in an environment of its own: `make test-atroposlib`")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """A program that a failed test has stopped or not waited for is ended, whatever state it is in."""
    yield
    for one in Process.started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    Process.started.clear()


@pytest.fixture
def our_server(tmp_path: Path) -> Iterator[Callable[..., OurServer]]:
    """Start `atropos serve` with these flags; every one of them is ended afterwards."""
    started: list[OurServer] = []

    def start(*flags: str, port: int = 0) -> OurServer:
        started.append(OurServer(tmp_path / "api", *flags, port=port))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.fixture
def their_server() -> Iterator[TheirServer]:
    """atroposlib's own `run-api`."""
    server = TheirServer()
    yield server
    server.end()


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()
