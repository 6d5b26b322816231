"""Calls over a real socket pair, in one process and to a real child."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import DataError, DeadlineExceeded, ProcessDied, RemoteError, WeightsMismatch
from atropos_core.processes.rpc import Peer, Reply
from tests.waiting import until


class Pair:
    """Two ends. The second answers."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.log: list[Any] = []
        self.started = asyncio.Event()
        self.other = Peer(theirs, "asker", self.handlers(), takes_descriptors=frozenset({"read", "keep"}))
        self.here = Peer(ours, "answerer", {"twice": self.twice})

    def handlers(self) -> dict[str, Any]:
        return {
            "twice": self.twice, "note": self.note, "fail": self.fail, "refuse": self.refuse, "wait": self.wait,
            "read": self.read, "give": self.give, "bad": self.bad, "back": self.back, "keep": self.keep,
            "cannot": self.cannot,
        }  # fmt: skip

    async def twice(self, value: Any) -> Any:
        return value * 2

    async def note(self, value: Any) -> None:
        self.log.append(value)

    async def fail(self) -> None:
        raise ZeroDivisionError("over there")

    async def refuse(self) -> None:
        raise WeightsMismatch("shapes differ", remedy="use others")

    async def cannot(self) -> None:
        raise NotImplementedError("it scores nothing")

    async def wait(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def read(self, *, descriptors: list[int]) -> bytes:
        texts = []
        for descriptor in descriptors:
            texts.append(os.pread(descriptor, 100, 0))
            os.close(descriptor)
        return b"|".join(texts)

    async def keep(self, *, descriptors: list[int]) -> int:
        self.log.append(descriptors)
        return len(descriptors)

    async def give(self, text: bytes) -> Reply:
        descriptor = os.memfd_create("given")
        os.write(descriptor, text)
        return Reply(len(text), [descriptor])

    async def bad(self) -> Any:
        return object()

    async def back(self, value: Any) -> Any:
        return await self.other.call("twice", value)

    def close(self) -> None:
        self.here.close()
        self.other.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.close()


async def test_a_call_gives_what_the_handler_returns(pair: Pair) -> None:
    assert await pair.here.call("twice", 21) == 42
    assert (await pair.here.call("twice", np.arange(3))).tolist() == [0, 2, 4]


async def test_what_is_requested_of_an_extension_is_owed_under_the_names_of_both(pair: Pair) -> None:
    """Else the longest call of one would be the usual one of the other."""
    asked = [asyncio.create_task(pair.here.call("call_extension", name)) for name in ("save", "receive")]
    await asyncio.sleep(0)
    assert pair.here.owed.last == "call_extension save"
    assert all(isinstance(one, RemoteError) for one in await asyncio.gather(*asked, return_exceptions=True))


async def test_megabytes_go_both_ways_at_once(pair: Pair) -> None:
    values = np.arange(3_000_000, dtype=np.int32)
    answers = await asyncio.gather(
        *(pair.here.call("twice", values) for _ in range(4)), *(pair.other.call("twice", values) for _ in range(4))
    )
    assert all(np.array_equal(answer, values * 2) for answer in answers)


async def test_calls_of_one_turn_start_in_order(pair: Pair) -> None:
    await asyncio.gather(*(pair.here.call("note", number) for number in range(100)))
    assert pair.log == list(range(100))


async def test_a_handler_may_call_back(pair: Pair) -> None:
    assert await pair.here.call("back", 4) == 8


async def test_our_errors_keep_their_class_and_remedy(pair: Pair) -> None:
    with pytest.raises(WeightsMismatch, match=r"(?s)shapes differ.*use others"):
        await pair.here.call("refuse")


async def test_foreign_errors_carry_their_traceback(pair: Pair) -> None:
    with pytest.raises(RemoteError, match=r"(?s)answerer raised ZeroDivisionError: over there.*Traceback.*test_rpc.py"):
        await pair.here.call("fail")


async def test_that_an_interface_leaves_a_method_out_is_reported_as_in_one_process(pair: Pair) -> None:
    with pytest.raises(NotImplementedError, match="it scores nothing"):
        await pair.here.call("cannot")


async def test_an_unknown_method_is_an_error_of_the_call_alone(pair: Pair) -> None:
    with pytest.raises(RemoteError, match="KeyError"):
        await pair.here.call("nothing")
    assert await pair.here.call("twice", 1) == 2


async def test_what_has_no_encoding_fails_its_own_call_and_no_other(pair: Pair) -> None:
    results = await asyncio.gather(
        pair.here.call("twice", object()), pair.here.call("twice", 3), pair.here.call("bad"), return_exceptions=True
    )
    assert isinstance(results[0], DataError) and results[1] == 6 and isinstance(results[2], DataError)


async def test_a_deadline_ends_the_call_and_its_handler(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded, match=r"answerer: wait\(\) gave no answer within 0.5 s"):
        await pair.here.call("wait", deadline_s=0.5)
    await until(lambda: pair.log, "the handler's end")
    assert pair.log == ["cancelled"]


async def test_cancelling_a_call_cancels_its_handler(pair: Pair) -> None:
    call = asyncio.ensure_future(pair.here.call("wait"))
    await pair.started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: pair.log, "the handler's end")
    assert pair.log == ["cancelled"]


async def test_descriptors_travel_with_the_call_that_names_them(pair: Pair) -> None:
    handles = []
    for text in (b"one", b"two"):
        handle = os.memfd_create("sent")
        os.write(handle, text)
        handles.append(handle)
    answers = await asyncio.gather(
        pair.here.call("twice", 1), pair.here.call("read", descriptors=handles), pair.here.call("read", descriptors=handles[:1]),
    )  # fmt: skip
    assert answers[1:] == [b"one|two", b"one"]
    for handle in handles:
        os.close(handle)


async def test_descriptors_come_back_to_the_caller_who_owns_them(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    value, [handle] = await pair.here.call_with_descriptors("give", b"hello")
    assert value == 5 and os.pread(handle, 10, 0) == b"hello"
    os.close(handle)
    await pair.here.call("give", b"hello")  # closed unseen
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_peer_that_hangs_up_ends_every_waiting_call(pair: Pair) -> None:
    calls = [asyncio.ensure_future(pair.here.call("wait")) for _ in range(3)]
    await pair.started.wait()
    pair.other.close()
    for call in calls:
        with pytest.raises(ProcessDied):
            await call
    assert pair.here.lost.is_set()
    with pytest.raises(ProcessDied):
        await pair.here.call("twice", 1)


async def test_closing_cancels_the_handlers_that_run(pair: Pair) -> None:
    call = asyncio.ensure_future(pair.here.call("wait"))
    await pair.started.wait()
    pair.other.close()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: pair.log, "the handler's end")
    assert pair.log == ["cancelled"]


CHILD = """
import asyncio, socket, sys
from atropos_core.processes.rpc import Peer

async def main():
    async def twice(value):
        return value * 2
    async def hang():
        await asyncio.sleep(60)
    peer = Peer(socket.socket(fileno=int(sys.argv[1])), "parent", {"twice": twice, "hang": hang})
    await peer.lost.wait()

asyncio.run(main())
"""


async def test_a_child_that_is_killed_ends_its_calls_at_once(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    peer = Peer(ours, "child", {})
    try:
        assert (await peer.call("twice", np.ones(3), deadline_s=30)).tolist() == [2, 2, 2]
        hanging = asyncio.ensure_future(peer.call("hang"))
        await asyncio.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        with pytest.raises(ProcessDied, match="child has gone away"):
            async with asyncio.timeout(30):
                await hanging
    finally:
        child.kill()
        child.wait()
        peer.close()


async def test_a_child_ends_when_its_parent_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    peer = Peer(ours, "child", {})
    try:
        await peer.call("twice", 1, deadline_s=30)
        peer.close()
        assert await asyncio.to_thread(child.wait, 30) == 0
    finally:
        child.kill()
        child.wait()


async def test_what_is_no_frame_ends_the_connection_with_a_named_error():
    ours, theirs = socket.socketpair()
    peer = Peer(ours, "the engine", {})
    waiting = asyncio.ensure_future(peer.call("anything", deadline_s=60))
    await asyncio.sleep(0)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProcessDied, match="the engine sent an invalid message"):
        await waiting
    theirs.close()


async def test_a_peer_that_closes_in_the_middle_of_a_frame_leaves_its_socket_number_to_the_next():
    ours, theirs = socket.socketpair()
    peer = Peer(ours, "the engine", {})
    waiting = asyncio.ensure_future(peer.call("take", np.zeros(5_000_000, np.uint8), deadline_s=60))
    await asyncio.sleep(0.05)  # nobody reads: the frame stands half sent
    number = ours.fileno()
    peer.close()
    with pytest.raises(ProcessDied):
        await waiting
    theirs.close()
    again, other = socket.socketpair()
    assert number in (again.fileno(), other.fileno()), "the number is used again, or this shows nothing"
    Peer(again, "a", {}).close()
    Peer(other, "b", {}).close()
