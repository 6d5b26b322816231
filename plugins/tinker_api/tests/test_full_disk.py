"""A disk that is full: a small one of memory, which only the server sees."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from plugins.tinker_api.tests.requests import Client, datum
from tests.tinker.server import TinkerServer
from tests.waiting import has_ended

MOUNTED = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
TOKENS = [index % 90 for index in range(1000)]
LONG = datum(TOKENS, target_tokens=TOKENS, weights=[0.01] * 1000)  # larger than the rest of a page
PAGE = 4096


@pytest.fixture
def small(tmp_path: Path, tiny: str) -> Iterator[TinkerServer]:
    """A server with a disk of 8 MB."""
    disk = tmp_path / "server"
    disk.mkdir()
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(disk))
    tried = subprocess.run([*before, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this user may not mount a disk of memory: {tried.stderr.strip()}")
    server = TinkerServer(tmp_path, tiny, before=before)
    server.start()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.stop()


def fill(server: TinkerServer, leave: int = 0) -> Path:
    """Fill the disk but for `leave` bytes, with the file that is returned."""
    assert server.process is not None
    filler = Path(f"/proc/{server.process.pid}/root{server.directory}/server/filler")
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(PAGE)):
            pass
    if leave:
        with filler.open("rb+") as file:
            file.truncate(filler.stat().st_size - leave)
    return filler


def test_a_request_that_the_disk_has_no_room_for_is_refused_and_the_server_continues(small: TinkerServer) -> None:
    plain, client = Client(small), Client(small)
    for one in (plain, client):
        one.done(one.send(1))
        one.done(one.step(2))
    plain.done(plain.send(3, LONG))
    plain.done(plain.step(4))
    expected = plain.forward(5)

    filler = fill(small)
    for _ in range(3):
        status, answer = client.send(3, LONG)
        assert status == 503 and "No space left" in answer["error"] and "Free some space" in answer["error"]
    assert small.call("GET", "healthz")[0] == 200
    filler.unlink()
    client.done(client.send(3, LONG))
    client.done(client.step(4))
    assert client.forward(5) == expected


def test_a_server_that_cannot_keep_a_result_ends_with_one_error_and_leaves_no_process(small: TinkerServer) -> None:
    client = Client(small)
    assert client.send(2, LONG, LONG, LONG)[0] == 200  # its result is longer than what will be left
    fill(small, leave=PAGE)
    assert small.process is not None
    children = [one.pid for one in psutil.Process(small.process.pid).children(recursive=True)]
    client.send(1)
    assert small.process.wait(120) != 0
    assert small.said().count("No space left") == 1 and "Traceback" not in small.said()
    assert len(children) >= 2 and all(has_ended(one) for one in children)
