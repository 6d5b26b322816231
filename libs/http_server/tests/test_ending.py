"""Calls that are not over when a server ends, and calls on which its application fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from typing import Any

import pytest

from atropos_core.errors import ConfigError
from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import ListenOptions, serve_in_loop


@pytest.mark.parametrize("begun", [False, True], ids=["no answer", "half an answer"])
async def test_who_is_not_answered_in_the_time_granted_hears_so_without_a_traceback(begun: bool, caplog: Any):
    called = asyncio.Event()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        called.set()
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.sleep(3600)

    caplog.set_level(logging.WARNING)
    server = await serve_in_loop(never, Gate(10, 10), "127.0.0.1", 0, stop=lambda: None, grace_s=1, keep_alive_s=10)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    await writer.drain()
    if begun:
        assert (await asyncio.wait_for(reader.readuntil(b"half"), 30)).startswith(b"HTTP/1.1 200")
    else:
        await asyncio.wait_for(called.wait(), 30)
    closing = asyncio.create_task(server.close())
    if begun:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
    else:
        said = await asyncio.wait_for(reader.read(), 30)
        assert (
            said.startswith(b"HTTP/1.1 503")
            and b"Send it again: it may be back in a moment." in said
            and b"retry-after: 5" in said
        )
    await asyncio.wait_for(closing, 30)
    writer.close()
    texts = [record.getMessage() for record in caplog.records if not record.getMessage().startswith("Cancel ")]
    assert texts == [] and all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("begun", [False, True], ids=["no answer", "half an answer"])
async def test_who_calls_what_the_application_fails_on_hears_what_failed(begun: bool, caplog: Any):
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise OSError("/a/secret/path is too long")

    server = await serve_in_loop(fails, Gate(10, 10), "127.0.0.1", 0, stop=lambda: None, grace_s=1, keep_alive_s=10)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    said = await asyncio.wait_for(reader.read(), 30)
    if begun:
        assert said.endswith(b"\r\n\r\nhalf")
    else:
        assert said.startswith(b"HTTP/1.1 500") and b"the server failed on this request: OSError" in said
    assert b"secret" not in said
    writer.close()
    await server.close()
    assert [record for record in caplog.records if record.exc_info]


OPTIONS = ListenOptions("sandbox.host", "sandbox.port")
NAMED = {
    "taken": ("127.0.0.1", OPTIONS, r"End it \(`ss .*or give another port with sandbox\.port; 0 takes any free one\.$"),
    "taken, without an option": ("127.0.0.1", ListenOptions(), r"or give another port; 0 takes any free one\.$"),
    "not of this machine": (
        "192.0.2.1",
        OPTIONS,
        r"^Give an address of this machine with sandbox\.host, as 127\.0\.0\.1\.$",
    ),
    "not an address": ("no.such.invalid", OPTIONS, r"^Give an address of this machine with sandbox\.host"),
}


@pytest.mark.parametrize(("host", "options", "remedy"), NAMED.values(), ids=NAMED)
async def test_where_nothing_can_listen_the_error_names_the_option_that_chooses_the_place(host, options, remedy):
    async def nothing(*asgi: object) -> None: ...

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="nothing can listen at") as found:
            await serve_in_loop(
                nothing, Gate(10, 10), host, port, stop=lambda: None, grace_s=1, keep_alive_s=1, options=options
            )
    assert re.search(remedy, found.value.remedy or "")
