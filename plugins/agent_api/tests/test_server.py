"""The API's server: who may call, what is refused before a call is read, and what a client that goes away leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from atropos_agent_api.server.running import open_agent_server
from atropos_agent_api.sessions.sessions import Sessions
from atropos_core.errors import ConfigError
from atropos_core.rollouts.tokenizer import ChatTokenizer
from plugins.agent_api.tests.sdk_types import data_of
from plugins.agent_api.tests.served_api import Api, api_of

USER: Any = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": USER}
CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "messages": USER, "max_tokens": 50},
}


def says(prompt: str, seed: int) -> str:
    return "Rain."


def ask(api: Api, path: str, body: Any, *, key: str | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /s/{api.session.id}{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or api.session.key}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def raw(api: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", CALLS)
async def test_a_session_is_found_by_path_and_key_and_by_key_alone(qwen: ChatTokenizer, path: str):
    async with api_of(qwen, says) as api, httpx.AsyncClient(timeout=10) as client:
        for base in (api.base, api.url):
            for header in ({"authorization": f"bearer {api.session.key}"}, {"x-api-key": api.session.key}):
                assert (await client.post(base + path, json=CALLS[path], headers=header)).status_code == 200
        for base, header, status in (
            (api.base, {}, 401),
            (api.url, {}, 401),
            (api.base, {"x-api-key": "sk-atropos-wrong"}, 401),
            (api.url, {"x-api-key": "sk-atropos-wrong"}, 401),
            (api.url, {"x-api-key": "\xff"}, 401),
            (f"{api.url}/s/nobody", {"x-api-key": api.session.key}, 404),
        ):
            headers = {name.encode(): value.encode("latin-1") for name, value in header.items()}
            answer = await client.post(base + path, json=CALLS[path], headers=headers)
            assert answer.status_code == status and answer.json()["error"]["message"], (base, header)
        assert len(api.engine.ledger) == 4


async def test_sdks_raise_their_own_exceptions_and_do_not_try_again(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.openai.with_options(api_key="wrong").chat.completions.create(model="m", messages=USER)
        with pytest.raises(anthropic.AuthenticationError):
            await api.anthropic.with_options(api_key="wrong").messages.create(model="m", messages=USER, max_tokens=9)
        api.sessions.end(api.session, "the program has ended")
        for sdk, of in ((openai, api.openai.chat.completions.create), (anthropic, api.anthropic.messages.create)):
            with pytest.raises(sdk.ConflictError, match="the program has ended") as refused:
                await of(model="m", messages=USER, max_tokens=9)
            assert refused.value.response.headers["x-should-retry"] == "false"
            assert refused.value.request.headers["x-stainless-retry-count"] == "0"


async def test_models_are_listed_for_both_sdks(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        assert [model.id async for model in api.openai.models.list()] == ["policy"]
        assert [model.id async for model in api.anthropic.models.list()] == ["policy"]
        assert (await api.openai.models.retrieve("gpt-5")).id == "gpt-5"


async def test_what_is_not_there_says_what_is(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("POST", "/chat/completions", 404),
            ("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("GET", "/v1", 404),
        ):  # fmt: skip
            answer = await api.http.request(method, path)
            assert answer.status_code == status, path
            assert status == 405 or "/v1/chat/completions" in answer.json()["error"]["message"]
        assert (await httpx.AsyncClient().get(f"{api.url}/health")).status_code == 200


async def test_a_stream_that_waits_gets_comments_and_then_its_answer(qwen: ChatTokenizer):
    async with api_of(qwen, says, server={"keep_alive_s": 0.05}) as api:
        for path, body in CALLS.items():
            api.engine.hold.clear()
            reader, writer = await raw(api)
            writer.write(ask(api, path, {**body, "stream": True}))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 30)
            await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 30)
            api.engine.hold.set()
            rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30)
            assert b"Rain" in rest
            writer.close()


@pytest.mark.parametrize("path", CALLS)
async def test_an_error_after_comments_is_an_event_that_the_sdks_raise(qwen: ChatTokenizer, path: str):
    async with api_of(qwen, says, server={"keep_alive_s": 0.05}) as api:
        api.engine.hold.clear()

        async def read() -> None:
            if path == "/v1/messages":
                async with api.anthropic.messages.stream(model="m", messages=USER, max_tokens=9) as stream:
                    await stream.get_final_message()
            elif path == "/v1/responses":
                async for _ in await api.openai.responses.create(model="m", input="hi", stream=True):
                    pass
            elif path == "/v1/completions":
                async for _ in await api.openai.completions.create(model="m", prompt="hi", stream=True):
                    pass
            else:
                async for _ in await api.openai.chat.completions.create(model="m", messages=USER, stream=True):
                    pass

        reading = asyncio.create_task(read())
        await api.engine.until_asked(1)
        await asyncio.sleep(0.3)  # a comment each 0.05 s
        api.sessions.end(api.session, "out of time")
        with pytest.raises((openai.APIError, anthropic.APIError), match="out of time"):
            await asyncio.wait_for(reading, 30)


@pytest.mark.parametrize("path", CALLS)
async def test_a_client_that_goes_away_while_it_waits_leaves_a_turn_that_a_retry_makes_an_orphan(
    qwen: ChatTokenizer, path: str
):
    async with api_of(qwen, says, server={"keep_alive_s": 0.05}) as api:
        api.engine.hold.clear()
        reader, writer = await raw(api)
        writer.write(ask(api, path, {**CALLS[path], "stream": True}))
        await asyncio.wait_for(reader.readuntil(b": keep-alive\n\n"), 30)
        await api.engine.until_asked(1)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        api.engine.hold.set()
        await until(lambda: len(api.engine.ledger) == 1)
        await until(lambda: api.session.record().metrics["agent/calls"] == 1)
        assert (await api.post(path, CALLS[path])).status_code == 200
        record = api.session.record()
        assert record.metrics["agent/calls"] == 2 and record.metrics["agent/orphans"] == 1
        [rollout] = record.rollouts
        assert rollout.tokens[rollout.trained].tolist() == api.engine.ledger[1].tokens.tolist()


async def test_a_client_that_goes_away_after_the_answer_loses_nothing_that_it_was_shown(qwen: ChatTokenizer):
    """It reads some of the events and continues from them on another connection."""
    async with api_of(qwen, says) as api:
        reader, writer = await raw(api)
        writer.write(ask(api, "/v1/chat/completions", {**CHAT, "stream": True}))
        seen = await asyncio.wait_for(reader.readuntil(b"Rain."), 30)
        writer.transport.abort()
        assert b"data: " in seen
        further = [*USER, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "and then?"}]
        answer = await api.openai.chat.completions.create(model="m", messages=further)  # type: ignore[arg-type]
        assert answer.usage is not None and answer.usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]
        [rollout] = api.session.record().rollouts
        assert rollout.tokens[rollout.trained].tolist() == [token for one in api.engine.ledger for token in one.tokens]


async def test_bodies_heads_and_silent_clients_are_bounded(qwen: ChatTokenizer):
    async with api_of(qwen, says, server={"body_bytes": 10_000, "request_s": 0.5}) as api:
        for path in CALLS:
            long = await api.post(path, {**CALLS[path], "model": "m" * 20_000})
            assert long.status_code == 413 and "limit" in long.json()["error"]["message"]
        assert (await api.post("/v1/messages", {"model": "m" * 20_000})).json()["type"] == "error"
        reader, writer = await raw(api)
        writer.write(b"POST /v1/messages HTTP/1.1\r\nx: " + b"x" * 100_000)
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 431")
        reader, writer = await raw(api)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        reader, writer = await raw(api)
        writer.write(ask(api, "/v1/messages", CALLS["/v1/messages"])[:-5])
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408")


async def test_hints_of_lineage_reach_the_session(qwen: ChatTokenizer):
    seen: list[Any] = []

    def is_trained(call: Any) -> bool:
        seen.append(call.hints)
        return True

    async with api_of(qwen, says, trained_calls=is_trained) as api:
        turn = {"agent_name": "explorer", "request_kind": "turn", "window_number": 1}
        headers = {
            "x-stainless-retry-count": "2",
            "session-id": "s" * 1000,
            "x-codex-turn-metadata": json.dumps(turn),
        }
        await api.post("/v1/chat/completions", CHAT, headers=headers)
        for broken in ("[{", "[]", '{"agent_name": 3}'):
            await api.post("/v1/chat/completions", CHAT, headers={"x-codex-turn-metadata": broken})
    assert seen == [{"retry": "2", "session": "s" * 200, "agent": "explorer", "kind": "turn"}, {}, {}, {}]


async def test_many_calls_at_once_are_each_answered(qwen: ChatTokenizer):
    async with api_of(qwen, lambda prompt, seed: prompt.split("number ")[1].split()[0]) as api:
        bodies = [{"model": "m", "messages": [{"role": "user", "content": f"number {at}"}]} for at in range(100)]
        answers = await asyncio.gather(*(api.post("/v1/chat/completions", one) for one in bodies))
        said = [one.json()["choices"][0]["message"]["content"] for one in answers]
        assert [text.split("<")[0] for text in said] == [str(at) for at in range(100)]


async def test_an_address_that_is_taken_is_named():
    sessions = Sessions()
    first = await open_agent_server(sessions, "policy")
    with pytest.raises(ConfigError, match="nothing can listen at 127.0.0.1"):
        await open_agent_server(sessions, "policy", port=int(first.url.rpartition(":")[2]))
    await first.close()


async def test_what_is_refused_in_a_stream_before_it_began_has_its_own_status(qwen: ChatTokenizer):
    async with api_of(qwen, says) as api:
        for path, body in CALLS.items():
            answer = await api.post(path, {**body, "stream": True, "nonsense": 1})
            assert answer.status_code == 400 and not data_of(answer.text) and "nonsense" in answer.text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: a", 200),
        (b"GET /health HTTP/1.1\r\nHOST: LocalHost.:80", 200),
        (b"GET /health HTTP/1.1\r\nhost: [::1]:80", 200),
        (b"GET /health HTTP/1.0", 200),
        (b"GET /health HTTP/1.1", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b", 400),
        (b"GET /health HTTP/1.0\r\nhost: a\r\nhost: a", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n b", 400),
        (b"GET /health HTTP/1.1\r\nhost:", 400),
        (b"GET /health HTTP/1.1\r\nhost: a, b", 400),
        (b"GET /health HTTP/1.1\r\nhost: a@b", 400),
        (b"GET /health HTTP/1.1\r\nhost: a:80:90", 400),
        (b"GET /health HTTP/1.1\r\nhost: a/b", 400),
        (b"GET http://b/health HTTP/1.1\r\nhost: a", 400),
        (b"GET http://a/health HTTP/1.1\r\nhost: a", 400),
        (b"CONNECT a:80 HTTP/1.1\r\nhost: a", 400),
        (b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ncontent-length: 1", 400),
        (b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ntransfer-encoding: chunked", 400),
        (b"POST /v1/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 0", 400),
    ],
)
async def test_a_request_that_names_two_hosts_or_two_ends_is_refused(qwen: ChatTokenizer, head: bytes, status: int):
    async with api_of(qwen, says) as api:
        reader, writer = await raw(api)
        writer.write(head + b"\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"%d" % status
        writer.close()
