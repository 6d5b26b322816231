"""The sandbox `external`: programs that the user starts take episodes over HTTP, each exactly one, and report their ends."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.environment.agent import Agent
from atropos_agent_api.environment.build import build
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, SandboxError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Episode
from atropos_testing.scripted import Script, ScriptedPolicy
from plugins.agent_api.tests.test_environment import FOUR, tasks_file
from plugins.agent_api.tests.test_hostile_values import RAW
from tests.waiting import until

GRADERS = Path(__file__).with_name("graders.py")
TAKES = """
import sys, time
from urllib.request import Request, urlopen
print(urlopen(Request(sys.argv[1] + "/episodes/next", b"", {"Authorization": "Bearer " + sys.argv[2]})).read().decode(), flush=True)
time.sleep(600)
"""


@dataclass
class Offering:
    """An open environment, and a client with its token."""

    agent: Agent
    http: httpx.AsyncClient
    url: str
    token_file: Path

    @property
    def takers(self) -> Any:
        """The programs that wait for an episode."""
        assert self.agent._external is not None
        return self.agent._external.queue._takers

    async def next(self, wait_s: int = 20, **headers: str) -> httpx.Response:
        return await self.http.post("/episodes/next", json={"wait_s": wait_s}, headers=headers)

    async def end(self, id: str, **report: Any) -> httpx.Response:
        return await self.http.post(f"/episodes/{id}/end", json=report)

    async def say(self, episode: dict[str, Any]) -> httpx.Response:
        """One call of the model, as the episode's program."""
        there = episode["environment"]
        return await self.http.post(
            f"{there['OPENAI_BASE_URL']}/chat/completions",
            json={"model": "any", "messages": [{"role": "user", "content": episode["task"]["prompt"]}]},
            headers={"authorization": f"Bearer {there['OPENAI_API_KEY']}"},
        )

    async def take(self, **report: Any) -> dict[str, Any]:
        """A whole episode: one call, and the report. Its own fields."""
        episode: dict[str, Any] = (await self.next()).json()
        assert (await self.say(episode)).status_code == 200
        assert (await self.end(episode["id"], **report)).status_code == 200
        return episode

    def rollout(self, *, at: int = 0, script: Script = FOUR, seed: int = 1) -> asyncio.Task[Episode]:
        """As a run does it: in a slot, then in its deadline."""

        async def run() -> Episode:
            task = self.agent.tasks("train")[at]
            async with self.agent.slot:
                return await self.agent.rollout(task, ScriptedPolicy(script, task), seed=seed)

        return asyncio.create_task(run())


Made = Callable[..., AbstractAsyncContextManager[Offering]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    @asynccontextmanager
    async def make(*, deterministic: bool = False, **options: Any) -> AsyncIterator[Offering]:
        external = {"use": "external", "port": 0, **options.pop("external", {})}
        usual = {"tasks": str(tasks_file(tmp_path)), "held_out": 0.0, "reward": {"plugin": "exact"}}
        context = RunContext(tmp_path, TOY_MODEL, label="environment.mine", deterministic=deterministic)
        agent = build(AgentOptions.model_validate({**usual, **options, "sandbox": external}), context)
        try:
            await agent.open()
            assert agent._server is not None
            url = agent._server.url
            token_file = Path(external.get("token_file", tmp_path / "agents" / "environment.mine.token"))
            bearer = {"authorization": f"Bearer {token_file.read_text().strip()}"}
            async with httpx.AsyncClient(base_url=url, headers=bearer, timeout=90) as http:
                yield Offering(agent, http, url, token_file)
        finally:
            await agent.close()

    return make


async def test_an_episode_is_taken_reported_and_scored_like_any_other(made: Made, tmp_path: Path) -> None:
    async with made(answer="stdout", env={"LEVEL": "of {task.id}"}) as there:
        rollout = there.rollout()
        episode = await there.take(output="4", errors="a warning", files={"notes/a.txt": "kept"})
        scored = await rollout
    assert (scored.score, scored.metrics["agent/calls"], scored.metrics["agent/delivered_share"]) == (1.0, 1.0, 1.0)
    assert scored.rollouts[0].trained.sum() == 2
    assert episode["task"] == {
        "id": "1",
        "prompt": "two and two",
        "messages": [{"role": "user", "content": "two and two"}],
    }
    assert episode["deadline_s"] == 240.0
    environment = episode["environment"]
    assert environment["LEVEL"] == "of 1"
    assert environment["OPENAI_BASE_URL"] == f"{environment['ANTHROPIC_BASE_URL']}/v1"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"]
    assert "ATROPOS_TASK_FILE" not in environment, "the program's machine does not have this file"
    [folder] = (tmp_path / "agents" / "mine").iterdir()
    assert ((folder / "stdout.txt").read_text(), (folder / "stderr.txt").read_text()) == ("4", "a warning")
    assert json.loads((folder / "account.json").read_text())["exit"]["code"] == 0


async def test_a_result_may_be_any_value_and_files_are_what_the_reward_sees(made: Made) -> None:
    async with made(reward={"function": f"{GRADERS}:file_is_right"}) as there:
        rollouts = [there.rollout(), there.rollout()]
        await there.take(output={"steps": [1, 2]}, files={"answer.txt": {"base64": base64.b64encode(b"4").decode()}})
        await there.take(files={"answer.txt": "5"})
        assert sorted([episode.score for episode in await asyncio.gather(*rollouts)]) == [0.0, 1.0]


async def test_a_reward_by_command_is_run_here_and_offered_to_nobody(made: Made, tmp_path: Path) -> None:
    grader = tmp_path / "grade.py"
    grader.write_text(
        "import json, sys\nprint(float(open(json.load(sys.stdin)['work'] + '/answer.txt').read() == '4'))\n"
    )
    async with made(reward={"command": ["{python}", str(grader)]}) as there:
        rollout = there.rollout()
        await there.take(files={"answer.txt": "4"})
        assert (await rollout).score == 1.0


async def test_there_may_be_no_episode_for_as_long_as_a_taker_waits(made: Made) -> None:
    async with made() as there:
        began = time.monotonic()
        answer = await there.next(wait_s=1)
        assert (answer.status_code, answer.content) == (204, b"")
        assert 0.9 < time.monotonic() - began < 30.0
        assert (await there.next(wait_s=61)).status_code == 400, "no longer than a bound"


@pytest.mark.parametrize("header", [{"authorization": "Bearer wrong"}, {"authorization": "Bearer ü"}, {}])
async def test_who_has_not_the_token_gets_nothing(made: Made, header: dict[str, str]) -> None:
    async with made() as there, httpx.AsyncClient(base_url=there.url) as http:
        for path in ("/episodes/next", "/episodes/x/end", "/episodes/other"):
            sent = {name: value.encode("latin-1") for name, value in header.items()}
            answer = await http.post(path, headers=sent)
            assert answer.status_code == 401 and answer.json()["error"]["message"]
        assert there.token_file.stat().st_mode & 0o077 == 0


async def test_a_token_of_ones_own_and_an_address_of_ones_own(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("a-word-of-many-letters\n")
    with pytest.raises(ConfigError, match="others on this machine can read"):
        async with made(external={"token_file": str(token)}):
            pass
    token.chmod(0o600)
    async with made(external={"token_file": str(token), "host": "0.0.0.0"}) as there:
        port = there.url.rpartition(":")[2]
        said = " ".join(capsys.readouterr().out.split())
        assert f"offered at http://127.0.0.1:{port}, and by this machine's name from elsewhere, to" in said
        assert "a-word-of-many-letters" not in said
        async with httpx.AsyncClient(headers={"authorization": "Bearer a-word-of-many-letters"}) as http:
            answer = await http.post(f"http://127.0.0.2:{port}/episodes/next", json={"wait_s": 0})
            assert answer.status_code == 204
        with pytest.raises(ConfigError, match=rf"nothing can listen at 127.0.0.1:{port}(.|\n)*with sandbox\.port"):
            async with made(external={"port": int(port)}):
                pass


async def test_the_token_that_was_made_is_that_of_the_resumed_run(made: Made) -> None:
    async with made() as there:
        token = there.token_file.read_text()
    async with made() as there:
        assert there.token_file.read_text() == token
        assert (await there.next(wait_s=0)).status_code == 204


async def test_addresses_are_those_by_which_the_taker_reached_the_run(made: Made) -> None:
    async with made(env={"MINE": "{base_url}"}) as there:
        for host in ("gpu-box.example:9000", "[fd00::1]:80"):
            rollout = there.rollout()
            episode = (await there.next(host=host)).json()
            assert episode["environment"]["OPENAI_BASE_URL"].startswith(f"http://{host}/s/")
            assert episode["environment"]["MINE"] == episode["environment"]["OPENAI_BASE_URL"]
            await there.end(episode["id"])
            with pytest.raises(DataError, match="made no call that is trained"):
                await rollout
        assert (await there.next(host="no host/at all")).status_code == 400


async def test_an_end_is_reported_once_and_in_time(made: Made) -> None:
    async with made(limits={"wall_s": 1.0}, on_failure="fail") as there:
        rollout = there.rollout()
        episode = await there.take()
        again = await there.end(episode["id"])
        assert again.status_code == 409 and "its end was reported" in again.json()["error"]["message"]
        assert (await there.say(episode)).status_code == 409, "its session has ended as well"
        await rollout
        late = there.rollout()
        episode = (await there.next()).json()
        await there.say(episode)
        with pytest.raises(DataError, match="the program failed: it exceeded its limit of wall time"):
            await late
        answer = await there.end(episode["id"])
        assert answer.status_code == 409 and "within its wall time of 1 s" in answer.json()["error"]["message"]
        assert (await there.end("never-was")).status_code == 404


async def test_a_taker_that_is_killed_loses_its_own_episode_alone(made: Made) -> None:
    async with made(limits={"wall_s": 6.0}) as there:
        lost = there.rollout()
        command = [sys.executable, "-S", "-c", TAKES, there.url, there.token_file.read_text().strip()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            episode = json.loads(await asyncio.to_thread(process.stdout.readline))
            process.kill()
        await there.say(episode)  # its agent had got so far
        other = there.rollout(at=1)
        await there.take()
        assert (await other).metrics["agent/limits_reached"] == 0.0
        ended = await lost
        assert (ended.score, ended.metrics["agent/limits_reached"]) == (1.0, 1.0), "graded as it left things"


async def test_a_taker_that_is_killed_while_it_waits_takes_nothing_along(made: Made) -> None:
    async with made(external={"patience_s": 60.0}) as there:
        command = [sys.executable, "-S", "-c", TAKES, there.url, there.token_file.read_text().strip()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            await until(lambda: there.takers, "a program that waits")
            process.kill()
        rollout = there.rollout()
        await there.take()
        assert (await rollout).score == 1.0


async def test_each_episode_goes_to_exactly_one_of_many_takers(made: Made) -> None:
    async with made(concurrency=8) as there:
        taken: list[tuple[int, str]] = []

        async def taker(number: int) -> None:
            while len(taken) < 40:
                answer = await there.next(wait_s=2)
                if answer.status_code == 204:  # a busy machine: none was there for two seconds
                    continue
                episode = answer.json()
                taken.append((number, episode["id"]))
                await asyncio.sleep(0.01)
                assert (await there.say(episode)).status_code == 200
                assert (await there.end(episode["id"])).status_code == 200

        rollouts = [there.rollout(at=number % 2, seed=number) for number in range(40)]
        await asyncio.gather(*(taker(number) for number in range(5)))
        assert len(await asyncio.gather(*rollouts)) == 40
    assert len({id for _, id in taken}) == len(taken) == 40
    assert len({number for number, _ in taken}) == 5, "all of them had some"


async def test_a_rollout_begins_once_somebody_is_there_to_take_it(made: Made) -> None:
    seen = []
    async with made() as there:
        task = there.agent.tasks("train")[0]

        async def run() -> Episode:
            async with there.agent.slot:
                seen.append(time.monotonic())
                return await asyncio.wait_for(there.agent.rollout(task, ScriptedPolicy(FOUR, task), seed=1), 20)

        rollouts = [asyncio.create_task(run()) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert not seen, "no deadline runs while no program is there"
        await there.take()
        await asyncio.sleep(0.3)
        assert len(seen) == 1
        await asyncio.gather(there.take(), there.take())
        assert len(await asyncio.gather(*rollouts)) == 3


async def test_where_nobody_comes_the_rollouts_fail_by_name(made: Made) -> None:
    async with made(external={"patience_s": 0.5}) as there:
        with pytest.raises(DeadlineExceeded, match=r"no program has asked for an episode for 0\.5 s"):
            await there.rollout()


async def test_a_run_that_ends_tells_those_who_wait(made: Made) -> None:
    async with made() as there:
        waiting = asyncio.create_task(there.next())
        taken = there.rollout()
        episode = (await waiting).json()
        waiting = asyncio.create_task(there.next(wait_s=60))
        await until(lambda: there.takers, "a program that waits")
        closing = asyncio.create_task(there.agent.close())
        answer = await waiting
        assert answer.status_code == 410 and "the run has ended" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        await closing
        with pytest.raises(SandboxError, match="the run has ended"):
            await taken
        assert episode["id"]


@pytest.mark.parametrize(
    ("limits", "report", "limit"),
    [
        ({"output_mb": 0.001}, {"output": "4" * 2000, "errors": "more"}, "output"),
        ({"disk_mb": 0.001}, {"files": {"a": "x" * 1000, "b": "y" * 1000}}, "disk"),
    ],
)
async def test_a_report_beyond_a_bound_is_kept_up_to_it_and_named(
    made: Made, tmp_path: Path, limits: dict[str, float], report: dict[str, Any], limit: str
) -> None:
    async with made(limits=limits) as there:
        rollout = there.rollout()
        episode = (await there.next()).json()
        await there.say(episode)
        answer = await there.end(episode["id"], **report)
        assert answer.json() == {"id": episode["id"], "limit": limit}
        assert (await rollout).metrics["agent/limits_reached"] == 1.0
    [folder] = (tmp_path / "agents" / "mine").iterdir()
    assert sum((folder / name).stat().st_size for name in ("stdout.txt", "stderr.txt")) <= 1048


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"exit_code": 256}, "exit_code must be an integer from 0 to 255"),
        ({"errors": 3}, "errors must be text"),
        ({"score": 1.0}, "'score' is not supported"),
        ({"files": ["a"]}, "files must be an object"),
        ({"files": {"/etc/passwd": "x"}}, "is not in the work directory"),
        ({"files": {"a/../../b": "x"}}, "is not in the work directory"),
        ({"files": {"": "x"}}, "is not in the work directory"),
        ({"files": {"a\0b": "x"}}, "is not in the work directory"),
        ({"files": {"x" * 256: "x"}}, "is not in the work directory"),
        ({"files": {"/".join("a" * 65): "x"}}, "is not in the work directory"),
        ({"files": {"a": "x", "a/b": "y"}}, "none of them a folder of another"),
        ({"files": {"a": "x", "./a": "y"}}, "of different paths"),
        ({"files": {str(number): "" for number in range(10_001)}}, "at most 10,000 files"),
        ({"files": {"a": {"base64": "?"}}}, "base64"),
        ({"files": {"a": {"hex": "00"}}}, "must be text, or"),
    ],
)
async def test_a_report_that_cannot_be_is_refused_and_may_be_sent_again(
    made: Made, report: dict[str, Any], message: str
) -> None:
    async with made() as there:
        rollout = there.rollout()
        episode = (await there.next()).json()
        await there.say(episode)
        answer = await there.end(episode["id"], **report)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert (await there.end(episode["id"])).status_code == 200
        assert (await rollout).score == 1.0


async def test_no_value_of_any_field_is_a_fault_of_ours(made: Made) -> None:
    async with made() as there:

        async def waits(body: bytes) -> None:
            """It is taken for a request to wait, or refused."""
            try:
                answer = await there.http.post("/episodes/next", content=body, timeout=0.2)
                assert answer.status_code in (204, 400), (body[:200], answer.status_code, answer.text[:200])
            except httpx.ReadTimeout:
                pass

        async def taken() -> str:
            there_is: str = (await there.next()).json()["id"]
            return there_is

        rollouts = [there.rollout()]
        id, ended = await taken(), 0
        for name in ("exit_code", "output", "errors", "files", "surprise", "wait_s"):
            for raw in RAW:
                body = b'{"%s": %s}' % (name.encode(), raw.encode("utf-8", "surrogatepass"))
                if name == "wait_s":
                    await waits(body)
                    continue
                answer = await there.http.post(f"/episodes/{id}/end", content=body)
                assert answer.status_code in (200, 400), (body[:200], answer.status_code, answer.text[:200])
                if answer.status_code == 200:
                    ended += 1
                    rollouts.append(there.rollout())
                    id = await taken()
        for path in (
            "/episodes/",
            "/episodes/next/",
            f"/episodes/{'x' * 5000}/end",
            "/episodes/%00/end",
            "/episodes/a/b/c",
        ):
            assert (await there.http.post(path, json={})).status_code == 404
        assert (await there.http.get("/episodes/next")).status_code == 405
        for raw in RAW:
            await waits(raw.encode("utf-8", "surrogatepass"))
        assert ended > 20
        await there.end(id)
        await asyncio.gather(*rollouts, return_exceptions=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"command": ["agent"]}, "command"),
        ({"function": "a:b"}, "function"),
        ({"files": {"a": {"text": "x"}}}, "files"),
        ({"stdin": "x"}, "stdin"),
        ({"network": True}, "network"),
        ({"limits": {"processes": 3}}, "processes"),
        ({"limits": {"memory_mb": 3}}, "memory_mb"),
    ],
)
def test_what_only_a_program_of_ours_could_have_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} has no effect with sandbox external"):
        AgentOptions.model_validate({"tasks_from": "gsm8k", "sandbox": "external", **options})


async def test_a_deterministic_run_is_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="deterministic = true is not possible with sandbox external"):
        async with made(deterministic=True):
            pass


def test_its_check_looks_at_the_tasks_and_waits_for_nobody() -> None:
    """`patience_s` is an hour."""
    options = ("tasks_from=gsm8k", 'sandbox={use="external", port=0}')
    command = [
        sys.executable,
        "-m",
        "atropos_core",
        "check",
        "agent",
        *(word for one in options for word in ("--set", one)),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "COLUMNS": "400"})
    assert checked.returncode == 0, checked.stdout + checked.stderr
    found = re.findall(r"^(unique ids|rollouts|poisoned programs) +(\S+) +(.*)$", checked.stdout, re.MULTILINE)
    assert [(name, how) for name, how, _ in found] == [
        ("unique ids", "ok"),
        ("rollouts", "note"),
        ("poisoned programs", "note"),
    ]
    assert "waits for a program that you start yourself" in found[1][2]
