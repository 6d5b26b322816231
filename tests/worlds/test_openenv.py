"""Servers of OpenEnv's own package on this machine: the contract, sessions, tools, a server that ends, and training."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import ConfigError, DeadlineExceeded, WorkerLost
from atropos_core.plugins.provider import RunContext
from atropos_env_openenv.config import OpenenvOptions
from atropos_env_openenv.environment import OpenEnv
from atropos_testing import check
from atropos_testing.scripted import Script, ScriptedPolicy
from tests.worlds.readme import run_table
from tests.worlds.training import train

SERVER = Path(__file__).parent / "openenv_server.py"
STARTS_S = 90.0  # its imports, on a machine that is busy


class Server:
    def __init__(self, kind: str, sessions: int, port: int = 0) -> None:
        if not port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        self.port, self.url, self.sessions, self.kind = port, f"http://127.0.0.1:{port}", sessions, kind
        self.process = subprocess.Popen([sys.executable, SERVER, kind, str(port), str(sessions)])
        until = time.monotonic() + STARTS_S
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                    f"{self.url}/health", timeout=5
                ).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, "the server did not start"
                time.sleep(0.2)

    def again(self) -> Server:
        return Server(self.kind, self.sessions, self.port)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server():
    """Starts servers; one of each kind and size is enough for all tests of a module."""
    made: dict[tuple[str, int], Server] = {}

    def start(kind: str, sessions: int) -> Server:
        if (kind, sessions) not in made or made[kind, sessions].process.poll() is not None:
            made[kind, sessions] = Server(kind, sessions)
        return made[kind, sessions]

    yield start
    for one in made.values():
        if one.process.poll() is None:
            one.kill()


def made(url: str, **options: Any) -> OpenEnv:
    fields = {} if options.get("tools") else {"field": "guess", "shown": "hint"}
    given = OpenenvOptions(**{"url": url, "tasks": 20, "held_out": 5, **fields, **options})
    return OpenEnv(given, RunContext(Path(), Path()))


async def rollout(environment: OpenEnv, *replies: str, index: int = 0) -> Any:
    """With these replies, one after another."""
    task, left = environment.tasks("train")[index], iter(replies)
    return await environment.rollout(task, ScriptedPolicy(Script("test", lambda task, seed: next(left)), task), seed=1)


def shown(episode: Any, role: str = "user") -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == role]


NUMBER = {"field": "guess", "shown": "hint", "action": "pattern", "pattern": r"\d", "max_turns": 3}


@pytest.mark.parametrize(("kind", "options"), [("number", NUMBER), ("echo", {"field": "message", "max_turns": 2})])
def test_a_server_of_openenv_keeps_the_contract(server, kind, options):
    found = check("environment", "openenv", {"url": server(kind, 8).url, **options})
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_at_a_server(server, tmp_path):
    table = {"use": "openenv", "url": server("number", 8).url, "tasks": 60, "held_out": 20, **NUMBER}
    train(tmp_path, {"number": table}, max_tokens=12, groups_per_step=6)


def test_the_table_of_the_readme_is_a_run_against_openenvs_own_template(server, tmp_path):
    run_table(tmp_path, "env_openenv", url=server("echo", 8).url)


async def test_a_number_is_guessed_by_the_servers_hints_and_its_rewards_are_the_score(server):
    environment = made(server("number", 8).url)
    await environment.open()
    found = [await rollout(environment, "0", "1", "2", "3", index=index) for index in range(20)]
    await environment.close()
    assert {shown(episode)[1] for episode in found if len(shown(episode)) > 1} == {"higher"}
    assert {episode.score for episode in found} == {0.0, 1.0}
    assert all(episode.correct == (episode.score == 1.0) for episode in found)


async def test_sessions_end_before_close_returns_and_the_server_has_nothing_to_say_of_it(capfd):
    server = Server("number", 3)
    for _ in range(3):  # each has all sessions that there are
        environment = made(server.url, sessions=3)
        await environment.open()
        assert environment.at_once == 3
        await rollout(environment, "0", "1", "2", "3")
        await environment.close()
    server.kill()
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out


async def test_a_server_that_hangs_does_not_keep_us():
    hanging = Server("number", 3)
    environment = made(hanging.url, sessions=3)
    await environment.open()
    os.kill(hanging.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    await environment.close()
    hanging.kill()
    assert time.monotonic() - began < 30


async def test_no_more_episodes_at_once_than_the_server_holds(server, capsys):
    environment = made(server("number", 3).url, sessions=8)
    await environment.open()
    assert environment.at_once == 3
    assert "holds 3 sessions: 3 episodes at once" in "".join(capsys.readouterr())
    other = made(server("number", 3).url)
    with pytest.raises(
        ConfigError, match="(?s)holds 3 sessions, and other clients use all of them.*max_concurrent_envs"
    ):
        await other.open()
    found = await asyncio.gather(*(rollout(environment, "0", "1", "2", "3", index=at % 20) for at in range(12)))
    assert len(found) == 12
    await environment.close()
    fewer = made(server("number", 3).url, sessions=2)
    await fewer.open()
    assert fewer.at_once == 2
    await fewer.close()


async def test_an_action_that_cannot_be_read_or_that_the_environment_raises_on_is_answered_and_the_episode_continues(
    server,
):
    environment = made(server("number", 8).url, sessions=1)
    await environment.open()
    episode = await rollout(environment, "ten", "0", "1", "2", "3")
    assert "error:" in shown(episode)[1] and "guess" in shown(episode)[1]
    episode = await rollout(environment, "98", "0", "1", "2", "3")
    assert "EXECUTION_ERROR" in shown(episode)[1] and "the dice are gone" in shown(episode)[1]
    assert (await rollout(environment, "0", "1", "2", "3")).metrics["steps/turns"] <= 4.0
    await environment.close()


async def test_a_step_that_is_late_fails_its_rollout_and_its_session_begins_anew(server):
    environment = made(server("number", 1).url, step_deadline_s=1.5)
    await environment.open()
    with pytest.raises(DeadlineExceeded, match="step gave no answer within 1.5 s"):
        await rollout(environment, "99")  # which the server is at for 3 s: until then it holds no other session
    assert shown(await rollout(environment, "0", "1", "2", "3"))[0].startswith("Guess the number")
    await environment.close()


async def test_a_rollout_that_is_cancelled_leaves_no_answer_to_the_next_one(server):
    environment = made(server("number", 1).url)
    await environment.open()
    for wait_s in (0.0, 0.005, 0.02):
        going = asyncio.ensure_future(rollout(environment, "0", "1", "2", "3"))
        await asyncio.sleep(wait_s)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
    assert shown(await rollout(environment, "0", "1", "2", "3"))[0].startswith("Guess the number")
    await environment.close()


async def test_a_server_that_is_killed_fails_rollouts_by_name_and_one_that_is_back_goes_on():
    first = Server("number", 4)
    environment = made(first.url, connect_deadline_s=2)
    try:
        await environment.open()
        before = await rollout(environment, "0", "1", "2", "3")
        going = asyncio.ensure_future(rollout(environment, "99"))
        await asyncio.sleep(0.3)
        first.kill()
        with pytest.raises(WorkerLost, match="closed the connection"):
            await going
        with pytest.raises(WorkerLost, match=f"no OpenEnv server answers at {first.url}"):
            await rollout(environment, "0")
        second = first.again()
        try:
            after = [await rollout(environment, "0", "1", "2", "3") for _ in range(4)]
            assert {tuple(shown(one)) for one in after} == {tuple(shown(before))}
        finally:
            second.kill()
    finally:
        await environment.close()
        if first.process.poll() is None:
            first.kill()


async def test_tools_of_a_server_are_called_and_answered(server):
    environment = made(server("tools", 8).url, tools=True, shown=None, system="Find it.")
    await environment.open()

    def call(where: str) -> str:
        return f'<tool_call>{{"name": "look", "arguments": {{"where": "{where}"}}}}</tool_call>'

    episode = await rollout(environment, call("bed") + call("box") + call("bed"))
    assert (episode.score, episode.correct) == (1.0, True)
    assert [message["role"] for message in episode.messages] == ["system", "user", "assistant"]
    twice = await rollout(environment, call("bed"), call("hall"), "I give up")
    assert len(shown(twice, "tool")) == 2 and all("nothing" in text for text in shown(twice, "tool"))
    assert (twice.score, twice.metrics["steps/cut_off"]) == (0.0, 0.0)
    wrong = await rollout(environment, '<tool_call>{"name": "no", "arguments": {}}</tool_call>', "I give up")
    assert "no" in shown(wrong, "tool")[0]
    await environment.close()


async def test_tools_that_a_server_does_not_have_are_named(server):
    environment = made(server("number", 8).url, tools=True, shown=None)
    with pytest.raises(ConfigError, match="(?s)it does not have tools.*give field"):
        await environment.open()


async def test_constant_fields_are_part_of_every_action(server):
    environment = made(server("number", 8).url, fields={"note": ", they say"}, max_turns=2)
    await environment.open()
    found = [await rollout(environment, "-1", "-1", index=index) for index in range(2)]
    await environment.close()
    assert [shown(episode)[1] for episode in found] == ["higher, they say"] * 2


async def test_openenvs_own_template_echoes(server):
    environment = made(server("echo", 8).url, field="message", shown="echoed_message", max_turns=2)
    await environment.open()
    episode = await rollout(environment, "hello", "again")
    await environment.close()
    assert shown(episode) == ["Echo environment ready!", "hello"]
    assert episode.score == pytest.approx(1.0)


async def test_a_server_that_does_not_follow_the_seed_is_named(server, capsys):
    environment = made(server("unseeded", 8).url)
    await environment.open()
    await environment.close()
    assert "ignores the seed of a reset" in "".join(capsys.readouterr())
