"""How bytes leave a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atropos_trajectory_api.connection import OneWrite
from plugins.trajectory_api.tests.running import running
from tests.raw_http import request


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
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(there, 1 << 20), 5)


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


def test_an_answer_comes_whole(tmp_path: Path):
    with running(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), 5) as end:
        for _ in range(3):
            end.sendall(request("GET", "/info"))
            head, _, body = end.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and body == b'{"batch_size":-1,"max_token_len":-1}'
