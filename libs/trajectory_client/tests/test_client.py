"""The API's client without a server: bad addresses, a missing module. With servers: plugins/trajectory_api/tests."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing

import pytest

from atropos_core.codec import encode_bytes
from atropos_core.errors import ApiError, ConfigError, TooLarge
from atropos_core.guards.patience import Patience
from atropos_core.types import Sampling, tokens
from atropos_trajectory_client.client import Api
from atropos_trajectory_client.remote_engine import RemoteEngine

QUICK = Patience(say_s=0.3, least_s=1.0)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused_with_one_that_is(url: str):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:8000"):
        Api(url)


async def test_a_server_that_is_not_there_is_an_error_at_the_deadline_and_not_before():
    api, began = Api("http://127.0.0.1:9"), time.monotonic()
    with pytest.raises(ApiError, match="atropos serve"):
        await api.about(deadline_s=1.0)
    assert time.monotonic() - began > 0.9
    await api.close()


async def test_a_server_that_is_not_there_is_reported_once_and_when_it_answers(capfd):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = Api(f"http://127.0.0.1:{port}", patience=QUICK)
    calls = [asyncio.create_task(api.about(deadline_s=30.0)) for _ in range(3)]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + encode_bytes({"protocol": 1}))
        writer.close()

    message = ""
    async with asyncio.timeout(60):
        while "Trying on" not in message:
            await asyncio.sleep(0.05)
            message += "".join(capfd.readouterr())
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        assert await asyncio.gather(*calls) == [{"protocol": 1}] * 3
    await api.close()
    message += "".join(capfd.readouterr())
    assert (message.count("no answer from"), message.count("answers again")) == (1, 1), message


async def test_a_server_that_was_away_and_is_slow_to_answer_is_not_called_silent(capfd):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = Api(f"http://127.0.0.1:{port}", patience=Patience(say_s=2.0, least_s=10.0))
    call = asyncio.create_task(api.about(deadline_s=30.0))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)  # of the two seconds after which it would be, seen at two looks
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + encode_bytes({"protocol": 1}))
        writer.close()

    await asyncio.sleep(2.2)  # refused all the time, so not silent
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        assert await call == {"protocol": 1}
    await api.close()
    assert "has given no answer" not in "".join(capfd.readouterr())


async def test_a_server_that_is_too_busy_to_read_a_call_is_called_again():
    answers = [b"503 Service Unavailable", b"502 Bad Gateway", b"200 OK"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = encode_bytes({"protocol": 1}) if len(answers) == 1 else b"try later"
        writer.write(b"HTTP/1.1 " + answers.pop(0) + b"\r\nconnection: close\r\n\r\n" + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as busy:
        api = Api(f"http://127.0.0.1:{busy.sockets[0].getsockname()[1]}")
        assert await api.about() == {"protocol": 1}
        await api.close()
    assert answers == []


async def test_a_server_that_is_stopped_is_named_and_a_long_call_to_it_is_given_up(capfd):
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel accepts connections, but no process reads them
        api = Api(f"http://127.0.0.1:{stopped.getsockname()[1]}", patience=QUICK)
        began = time.monotonic()
        with pytest.raises(ApiError, match="has answered nothing for 1 s, POST /v1/engine/load_weights least of all"):
            await api.call("POST", "/v1/engine/load_weights", {}, wait_s=1800)
        assert time.monotonic() - began < 30
        assert "has given no answer to POST /v1/engine/load_weights for" in capfd.readouterr().err
        await api.close()


async def test_a_server_that_works_at_a_long_call_is_not_called_silent(capfd):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2.0 if head.startswith(b"POST") else 0)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as slow:
        api = Api(
            f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}", patience=Patience(say_s=0.3, least_s=20.0)
        )  # a probe may take a quarter of that
        await api.call("POST", "/v1/engine/load_weights", {}, wait_s=1800)
        await api.close()
    assert capfd.readouterr().err == ""


async def test_samples_of_an_engine_elsewhere_that_is_stopped_are_given_up_at_the_same_bound(monkeypatch, capfd):
    monkeypatch.setattr("atropos_trajectory_client.http.BEAT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        engine = RemoteEngine(f"http://127.0.0.1:{stopped.getsockname()[1]}", patience=QUICK)
        with pytest.raises(ApiError, match="went away during /v1/engine/samples"):
            async with asyncio.timeout(20):
                await engine.sample(tokens([1]), 1, Sampling(), [0], 600.0)
        assert "has given no answer to POST /v1/engine/samples for" in capfd.readouterr().err
        await engine.close()


async def test_what_a_proxy_finds_too_large_is_an_error_of_that_name():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nconnection: close\r\n\r\n<html>nginx</html>")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        api = Api(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        with pytest.raises(TooLarge, match="answered 413 to /v1/groups"):
            await api.call("POST", "/v1/groups", {"groups": []})
        await api.close()
