"""An engine elsewhere whose answers are not what an engine's are."""

from __future__ import annotations

import asyncio

import pytest

from atropos_core.codec import encode_bytes
from atropos_core.errors import DataError
from atropos_core.types import Sampling, tokens
from atropos_trajectory_client.remote_engine import RemoteEngine


@pytest.mark.parametrize(
    "item", [{"value": []}, {"call": 7, "value": []}, [1, 2], {"call": 0, "error": {"no": "name"}}]
)
async def test_an_answer_that_is_no_sample_is_named_and_nobody_waits_for_more(item):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = encode_bytes(item)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        engine = RemoteEngine(url)
        with pytest.raises(DataError, match=f"{url} sent an invalid sample"):
            await engine.sample(tokens([1, 2]), 1, Sampling(2), [0], 30)
        await engine.close()
