"""What is known without an OpenEnv server."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from pydantic import ValidationError
from websockets.asyncio.server import serve

from atropos_core.errors import ConfigError, RemoteError, WorkerLost
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_env_openenv.config import OpenenvOptions
from atropos_env_openenv.environment import OpenEnv, Remote, text_of
from atropos_env_openenv.sessions import Session, Sessions

URL = "http://127.0.0.1:9"  # no server listens there


def test_what_follows_the_colon_is_the_url():
    found = load_plugins().registry.find("environment", "openenv:http://127.0.0.1:8000").provider
    assert found.argument == "url"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": URL}, "give field"),
        ({"url": URL, "field": "message", "tools": True}, "give field"),
        ({"url": "127.0.0.1:8000", "field": "message"}, "must begin with http://"),
        ({"url": URL, "tools": True, "template": "x{action}"}, "template has no effect with tools"),
        ({"url": URL, "tools": True, "fields": {"a": 1}}, "fields has no effect with tools"),
        ({"url": URL, "field": "message", "sessions": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        OpenenvOptions(**options)


@pytest.mark.parametrize(
    ("observation", "shown", "text"),
    [
        ({"a": "x", "b": 1}, "a", "x"),
        ({"a": ["x", "é"]}, "a", '["x", "é"]'),
        ({"a": "x", "b": 1}, None, '{"a": "x", "b": 1}'),
        ({"b": 1}, "a", ""),
        (None, None, "{}"),
    ],
)
def test_what_is_shown_of_an_observation(observation, shown, text):
    assert text_of({"observation": observation}, shown) == text


async def test_a_server_that_never_answers_is_given_up(tmp_path):
    kept = []  # from Python 3.12 on, a writer without a reference is closed
    silent = await asyncio.start_server(lambda reader, writer: kept.append(writer), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    options = OpenenvOptions(url=url, field="message", connect_deadline_s=0.3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"no OpenEnv server answers at {url}.*timed out"):
        await OpenEnv(options, RunContext(tmp_path, tmp_path)).open()
    assert time.monotonic() - began < 30
    silent.close()


async def test_a_server_that_is_not_there_and_a_deterministic_run_are_refused_by_name(tmp_path):
    options = OpenenvOptions(url=URL, field="message", connect_deadline_s=5.0)
    with pytest.raises(
        ConfigError, match="(?s)no OpenEnv server answers at http://127.0.0.1:9.*Start the server first"
    ):
        await OpenEnv(options, RunContext(tmp_path, tmp_path)).open()
    with pytest.raises(ConfigError, match="a run with an OpenEnv server cannot be deterministic"):
        OpenEnv(options, RunContext(tmp_path, tmp_path, deterministic=True))


async def test_a_server_that_is_started_again_is_waited_for_until_the_deadline():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def answer(connection):
        async for text in connection:
            await connection.send(json.dumps({"type": "said", "data": json.loads(text)}))

    session = Session(OpenenvOptions(url=f"http://127.0.0.1:{port}", field="message", connect_deadline_s=30.0))
    going = asyncio.ensure_future(session.request("reset", {"seed": 1}))
    await asyncio.sleep(0.3)
    assert not going.done()
    async with serve(answer, "127.0.0.1", port):
        assert await going == {"type": "reset", "data": {"seed": 1}}
        await session.close()
    late = Session(OpenenvOptions(url=f"http://127.0.0.1:{port}", field="message", connect_deadline_s=0.3))
    with pytest.raises(WorkerLost, match="no OpenEnv server answers"):
        await late.request("reset", {"seed": 1})


def raising(code: str, on: str):
    """A server's connection that answers one kind of message with an error, as OpenEnv does when the environment raises."""

    async def answer(connection):
        async for text in connection:
            asked = json.loads(text)
            bad = (
                asked["type"] == on
                and asked.get("data", {}).get("arguments", asked.get("data", {})).get("move") != "good"
            )
            said = {"observation": {"board": "fine"}, "reward": 1.0, "done": False}
            data = {"message": "no such move", "code": code} if bad else said
            await connection.send(json.dumps({"type": "error" if bad else "observation", "data": data}))

    return serve(answer, "127.0.0.1", 0)


async def episode_at(server, **more):
    port = server.sockets[0].getsockname()[1]
    options = OpenenvOptions(url=f"http://127.0.0.1:{port}", sessions=1, **more)
    sessions = Sessions(options)
    await sessions.open()
    return sessions, Remote(sessions, options)


@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "EXECUTION_ERROR"])
@pytest.mark.parametrize("shown", ["board", None])
async def test_an_action_that_the_environment_raises_on_is_shown_to_the_policy_and_the_episode_continues(code, shown):
    async with raising(code, "step") as server:
        sessions, episode = await episode_at(server, field="move", shown=shown)
        await episode.reset(1)
        bad = await episode.step({"role": "assistant", "content": "bad"}, "bad")
        good = await episode.step({"role": "assistant", "content": "good"}, "good")
        await sessions.close()
    assert "no such move" in bad.messages[0]["content"] and code in bad.messages[0]["content"]
    assert (list(bad.rewards), bad.ended) == ([0.0], False)
    assert (list(good.rewards), good.ended) == ([1.0], False)


async def test_a_tool_call_that_the_environment_raises_on_is_answered_and_the_next_call_is_made():
    async with raising("EXECUTION_ERROR", "step") as server:
        sessions, episode = await episode_at(server, tools=True)
        await episode.reset(1)
        calls = [{"function": {"name": "go", "arguments": {"move": move}}} for move in ("bad", "good")]
        turn = await episode.step({"role": "assistant", "content": "", "tool_calls": calls}, "")
        await sessions.close()
    assert ["no such move" in one["content"] for one in turn.messages] == [True, False]
    assert (list(turn.rewards), turn.ended) == ([1.0], False)


@pytest.mark.parametrize(("code", "on"), [("EXECUTION_ERROR", "reset"), ("SESSION_ERROR", "step")])
async def test_a_server_that_is_broken_fails_the_rollout(code, on):
    async with raising(code, on) as server:
        sessions, episode = await episode_at(server, field="move")
        with pytest.raises(RemoteError, match=code):
            await episode.reset(1)
            await episode.step({"role": "assistant", "content": "bad"}, "bad")
        await sessions.close()
