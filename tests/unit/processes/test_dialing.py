"""A child on another machine dials, and both ends prove that they know one secret. Real sockets; the calls over them are rpc's."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import ConfigError, DeadlineExceeded, FitError, ProcessDied, RunDirectoryError
from atropos_core.launchers import StartedProcess
from atropos_core.plugins.provider import RunContext
from atropos_core.processes import dialing
from atropos_core.processes.dialing import SECRET, Listener, connected, dial
from atropos_core.processes.rpc import Peer


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener("127.0.0.1")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_secret() -> Iterator[None]:
    yield
    os.environ.pop(SECRET, None)


async def dialled(address: str, secret: str) -> socket.socket:
    os.environ[SECRET] = secret
    return await asyncio.to_thread(dial, address)


async def test_calls_go_both_ways_over_a_connection_that_was_dialled(listener):
    secret, expected = listener.expect()
    theirs = await dialled(listener.address, secret)
    assert SECRET not in os.environ, "what the child starts does not inherit it"

    async def twice(value: np.ndarray) -> np.ndarray:
        return value * 2

    async def ask() -> int:
        return int(await other.call("number", deadline_s=10))

    async def number() -> int:
        return 7

    here = Peer(await asyncio.wait_for(expected, 10), "engine", {"number": number})
    other = Peer(theirs, "the supervisor", {"twice": twice, "ask": ask})
    assert (await here.call("twice", np.arange(300_000), deadline_s=10)).sum() == np.arange(300_000).sum() * 2
    assert await here.call("ask", deadline_s=10) == 7
    assert here.is_remote and other.is_remote
    here.close()
    await asyncio.wait_for(other.lost.wait(), 10)
    other.close()


async def test_descriptors_cannot_travel_and_that_is_said(listener):
    secret, expected = listener.expect()
    other = Peer(await dialled(listener.address, secret), "the supervisor", {})
    here = Peer(await asyncio.wait_for(expected, 10), "engine", {})
    with pytest.raises(FitError, match=r"engine is on another machine, and load\(\) would share memory with it"):
        await here.call("load", descriptors=[0], deadline_s=10)
    here.close()
    other.close()


async def test_one_that_does_not_know_the_secret_is_hung_up_on(listener):
    _, expected = listener.expect()
    with pytest.raises(ProcessDied, match="is not the supervisor that started this process"):
        await dialled(listener.address, secrets.token_hex(32))
    assert not expected.done()


async def test_a_secret_is_good_for_one_connection(listener):
    secret, expected = listener.expect()
    first = await dialled(listener.address, secret)
    await asyncio.wait_for(expected, 10)
    with pytest.raises(ProcessDied):
        await dialled(listener.address, secret)
    first.close()
    expected.result().close()


async def test_a_child_hangs_up_on_one_that_only_pretends_to_be_the_supervisor():
    """It answers with what a listener sends, without the secret."""
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = server.accept()
        connection.sendall(bytes(32))
        received = b""
        while len(received) < 64:
            received += connection.recv(64)
        connection.sendall(received[32:])  # the child's own proof, sent back
        connection.close()

    pretending = asyncio.create_task(asyncio.to_thread(pretend))
    with pytest.raises(ProcessDied, match="is not the supervisor"):
        await dialled(f"127.0.0.1:{server.getsockname()[1]}", secrets.token_hex(32))
    await pretending
    server.close()


async def test_strangers_that_say_nothing_keep_nobody_out_and_are_hung_up_on(listener, monkeypatch):
    monkeypatch.setattr(dialing, "PROOF_DEADLINE_S", 0.5)
    host, port = listener.address.split(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(2 * dialing.AT_ONCE)]
    secret, expected = listener.expect()
    theirs = await dialled(listener.address, secret)
    (await asyncio.wait_for(expected, 10)).close()
    theirs.close()
    for stranger in strangers:
        stranger.settimeout(10)
        assert len(await asyncio.to_thread(stranger.recv, 64)) == 32
        assert await asyncio.to_thread(stranger.recv, 64) == b"", "hung up"
        stranger.close()


async def test_several_children_get_a_connection_each_in_whatever_order_they_dial(listener):
    expected = [listener.expect() for _ in range(5)]
    theirs = [await dialled(listener.address, secret) for secret, _ in reversed(expected)]
    for number, ((_, future), child) in enumerate(zip(expected, reversed(theirs), strict=True)):
        ours = await asyncio.wait_for(future, 10)
        child.sendall(bytes([number]))
        assert await asyncio.get_running_loop().sock_recv(ours, 1) == bytes([number])
        ours.close()
        child.close()


async def test_a_supervisor_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(DeadlineExceeded, match=f"the supervisor at {address} cannot be reached from this machine"):
        await dialled(address, secrets.token_hex(32))


async def test_who_waits_when_the_listener_closes_is_not_left_waiting():
    listener = Listener("127.0.0.1")
    _, expected = listener.expect()
    listener.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(expected, 10)


async def built_elsewhere(listener: Listener, directory: Path, model: Path) -> None:
    """Have a process that has dialled build an engine, of a run in `directory`."""
    secret, expected = listener.expect()
    child = subprocess.Popen(
        [sys.executable, "-m", "atropos_core.processes.child_main", listener.address, "engine"],
        env={**os.environ, SECRET: secret},
    )
    peer = Peer(await asyncio.wait_for(expected, 60), "engine", {})
    context = RunContext(directory=directory, model=model).record()
    try:
        await peer.call("build", {"kind": "engine", "name": "toy", "options": {}, "context": context}, deadline_s=60)
    finally:
        peer.close()
        assert await asyncio.to_thread(child.wait, 10) == 0, "it ends with its connection"


async def test_a_machine_without_the_run_directory_or_the_model_is_named_before_anything_is_built(listener, tmp_path):
    with pytest.raises(RunDirectoryError, match=rf"the run directory {tmp_path} is not on {socket.gethostname()}"):
        await built_elsewhere(listener, tmp_path, TOY_MODEL)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/engine.log").touch()
    with pytest.raises(ConfigError, match=rf"the model directory {tmp_path}/model is not on {socket.gethostname()}"):
        await built_elsewhere(listener, tmp_path, tmp_path / "model")
    await built_elsewhere(listener, tmp_path, TOY_MODEL)


class Starting(StartedProcess):
    """It runs until it is killed, or has ended already."""

    named = "pid 7"

    def __init__(self, how: str | None = None) -> None:
        self.how = how

    def ended(self) -> str | None:
        return self.how

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        self.how = self.how or "was killed by SIGKILL"


async def test_a_started_process_is_waited_for_until_it_connects_ends_or_is_late(listener, tmp_path):
    (log := tmp_path / "engine.log").write_text("loading\nno such device\n")
    secret, expected = listener.expect()
    dialling = asyncio.create_task(asyncio.to_thread(dial, listener.address, secret))
    connection = await connected(Starting(), expected, "engine", 30, log)
    assert connection.fileno() >= 0
    connection.close()
    (await dialling).close()
    ended = Starting("ended with exit code 3")
    with pytest.raises(ProcessDied, match=r"engine \(pid 7\) ended with exit code 3\. no such device"):
        await connected(ended, listener.expect()[1], "engine", 30, log)
    late = Starting()
    with pytest.raises(DeadlineExceeded, match=r"did not connect within 0\.2 s\."):
        await connected(late, listener.expect()[1], "engine", 0.2, tmp_path / "none.log")
    assert late.ended() == "was killed by SIGKILL"
