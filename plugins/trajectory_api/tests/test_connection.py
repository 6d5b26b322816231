"""How bytes leave a connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_http_server.connection import BODY_S, UNTAKEN_BYTES, Connection, OneWrite
from atropos_http_server.connection_limits import HEAD_BYTES
from plugins.trajectory_api.tests.running import Running, running
from tests.raw_http import request

HALF_BODY = b"POST /scored_data HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50\r\n\r\n{"


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[Any, socket.socket]]:
    """A transport of this loop, and the socket at its other end."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    there.setblocking(False)
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=here)
    try:
        yield OneWrite(transport, loop), there
    finally:
        transport.abort()
        there.close()


async def received(there: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(there, 1 << 20), 30)


async def test_head_and_body_leave_together():
    async with ends() as (transport, there):
        transport.write(b"head")
        assert transport.get_write_buffer_size() == 4
        transport.write(b"body")
        assert await received(there) == b"headbody"


async def test_a_head_that_nothing_follows_does_not_wait():
    async with ends() as (transport, there):
        transport.write(b"head")
        assert await received(there) == b"head"
        transport.write(b"part")
        transport.write(b" of the body" * 100_000)  # more than the socket takes
        assert transport.get_write_buffer_size() > 0
        got = b""
        while len(got) < 4 + 1_200_000:
            got += await received(there)
        assert got == b"part" + b" of the body" * 100_000


async def test_what_was_written_leaves_before_the_connection_closes():
    async with ends() as (transport, there):
        transport.write(b"last words")
        transport.close()
        assert await received(there) == b"last words"
        assert await received(there) == b""


async def test_a_head_with_an_empty_body_leaves_and_the_connection_closes():
    """asyncio's transport of Python 3.12 and 3.13 keeps an empty part of several for ever."""
    async with ends() as (transport, there):
        transport.write(b"no content")
        transport.write(b"")
        transport.close()
        assert await received(there) == b"no content"
        assert await received(there) == b""


def test_an_answer_comes_whole(tmp_path: Path):
    with running(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), 60) as end:
        for _ in range(3):
            end.sendall(request("GET", "/info"))
            head, _, body = end.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and body == b'{"batch_size":-1,"max_token_len":-1}'


def answered(server: Running) -> int:
    """Requests for /openapi.json that were answered so far."""
    return sum(one.latency.count for route, one in server.service.counters.routes.items() if route == "/openapi.json")


def test_a_client_that_takes_no_answers_gets_no_further_ones_made(tmp_path: Path):
    """Its requests were sent ahead; copying the answers would be useless."""
    with running(tmp_path) as server, socket.socket() as end:
        whole = len(server.client.get("/openapi.json").content)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.connect(("127.0.0.1", server.port))
        many = 200
        end.sendall(request("GET", "/openapi.json") * many)
        time.sleep(0.5)
        assert answered(server) - 1 <= UNTAKEN_BYTES // whole + 4
        end.settimeout(60)
        left = many * whole
        while left > 0:
            left -= len(end.recv(1 << 20))  # heads are read for bodies: it ends before the last ones
        assert answered(server) - 1 > many // 2, "and who reads gets them"


def test_a_client_that_goes_without_reading_leaves_nothing_behind(tmp_path: Path):
    """What it sent ahead would stay until the deadline of answers that nobody reads."""
    with running(tmp_path, request_s=60.0) as server:
        ends = [socket.socket() for _ in range(4)]
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            end.connect(("127.0.0.1", server.port))
            end.sendall(request("GET", "/openapi.json") * 2000)
        until = time.monotonic() + 60
        while waiting_bytes() < 4 * HEAD_BYTES and time.monotonic() < until:
            time.sleep(0.05)
        assert waiting_bytes() >= 4 * HEAD_BYTES
        time.sleep(0.5)  # it waits for them to read
        for end in ends:
            end.close()
        until = time.monotonic() + 60
        while waiting_bytes() and time.monotonic() < until:
            time.sleep(0.05)
        assert waiting_bytes() == 0
        assert server.service.counters.snapshot()["refused_connections"] == {}


def waiting_bytes() -> int:
    """Of requests that were sent ahead, on all connections of this process."""
    # the class of a proxy may be of what is gone already
    return sum(len(one._rest) for one in gc.get_objects() if issubclass(type(one), Connection))


def test_a_request_whose_body_does_not_come_costs_no_task_until_others_would_wait_for_it(tmp_path: Path):
    with running(tmp_path) as server:

        def tasks() -> int:
            return len(server._server.server_state.tasks)

        ends = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(20)]
        began = time.monotonic()
        for end in ends:
            end.sendall(HALF_BODY)
        most = 0
        while time.monotonic() - began < BODY_S / 2:
            most = max(most, tasks())
        sent_s = time.monotonic() - began
        until = time.monotonic() + 60
        while tasks() < len(ends) and time.monotonic() < until:
            time.sleep(0.01)
        assert tasks() == len(ends), "the application waits for them now, and ends them at its deadline"
        assert most == 0 or sent_s > BODY_S
        for end in ends:
            end.sendall(b" " * 48 + b"}")
            assert end.recv(1 << 16).startswith(b"HTTP/1.1 422")
            end.close()


@pytest.mark.parametrize(
    "sent", [request("GET", "/info"), HALF_BODY, HALF_BODY[:30], b"", b"no HTTP\r\n\r\n"],
    ids=["answered", "half a body", "half a head", "nothing", "no HTTP"],
)  # fmt: skip
@pytest.mark.parametrize("wait_s", [0.05, BODY_S + 0.2], ids=["at once", "requested"])
def test_a_connection_that_has_ended_leaves_nothing_to_the_collector(sent: bytes, wait_s: float, tmp_path: Path):
    """It would look at all that thousands of them left, late, and hold everyone up meanwhile."""
    with running(tmp_path, connections=4) as server:
        gc.collect()
        gc.disable()
        try:
            ends = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(8)]  # four make way
            for end in ends:
                with contextlib.suppress(ConnectionError):
                    end.sendall(sent)
            time.sleep(wait_s)
            for end in ends:
                end.close()
            until = time.monotonic() + 60
            while (left := connections_in_memory()) and time.monotonic() < until:
                time.sleep(0.05)
            assert left == 0
        finally:
            gc.enable()


def connections_in_memory() -> int:
    return sum(issubclass(type(one), Connection) for one in gc.get_objects())  # a proxy may be of what is gone
