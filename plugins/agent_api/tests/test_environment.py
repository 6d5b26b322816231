"""The environment `agent`: programs run against sessions of a scripted policy, and are scored by what they left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn

from atropos_agent_api.config import AgentOptions, LimitOptions
from atropos_agent_api.environment.agent import Agent
from atropos_agent_api.environment.build import build
from atropos_agent_api.server.running import open_agent_server
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import AtroposError, ConfigError, DataError
from atropos_core.plugins.provider import RunContext
from atropos_core.turn_rewards import turn_ends
from atropos_core.types import Episode, Sampling, Task
from atropos_testing.scripted import Script, ScriptedPolicy
from tests.waiting import until

PROGRAMS = Path(__file__).with_name("agent_programs.py")
GRADERS = Path(__file__).with_name("graders.py")
TASKS = ["two and two", "three and three"]
FOUR = Script("four", lambda task, seed: "4")
OPEN = {"sandbox": "process", "network": True}
Made = Callable[..., AbstractAsyncContextManager[Agent]]


def tasks_file(folder: Path, name: str = "tasks.jsonl", **fields: Any) -> Path:
    path = folder / name
    lines = [{"prompt": prompt, "answer": answer, **fields} for prompt, answer in zip(TASKS, ("4", "6"), strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def made(tmp_path: Path) -> Made:
    @asynccontextmanager
    async def make(program: str = "once", *, deterministic: bool = False, **options: Any) -> AsyncIterator[Agent]:
        usual = {
            "command": ["{python}", "-S", str(PROGRAMS), program],
            "tasks": str(tasks_file(tmp_path)), "held_out": 0.0,
            "reward": {"plugin": "exact"}, **OPEN,
        }  # fmt: skip
        given = {**usual, **options}
        if "tasks_from" in options:
            given = {name: value for name, value in given.items() if name not in ("tasks", "held_out", "reward")}
        context = RunContext(tmp_path, TOY_MODEL, label="environment.mine", deterministic=deterministic)
        agent = build(AgentOptions.model_validate(given), context)
        try:
            await agent.open()
            yield agent
        finally:
            await agent.close()

    return make


async def one(agent: Agent, script: Script = FOUR, *, at: int = 0, seed: int = 1) -> Episode:
    task = agent.tasks("train")[at]
    return await agent.rollout(task, ScriptedPolicy(script, task), seed=seed)


def streams(folder: Path) -> list[Path]:
    return sorted((folder / "agents" / "mine").iterdir())


async def test_a_program_is_run_and_scored_and_what_it_wrote_is_kept(made: Made, tmp_path: Path) -> None:
    async with made() as agent:
        right, wrong = await one(agent), await one(agent, at=1)
    assert (right.score, wrong.score) == (1.0, 0.0)
    [rollout] = right.rollouts
    assert rollout.trained.sum() == 2  # "4", and the end of the turn
    assert [message["content"] for message in right.messages] == ["two and two", "4"]
    assert right.metrics["agent/calls"] == right.metrics["agent/delivered_share"] == 1.0
    first, second = streams(tmp_path)
    assert (first.name, second.name) == ("000000-1", "000001-2")
    assert (first / "stdout.txt").read_text() == "4\n"
    assert json.loads((first / "account.json").read_text())["spans"][-1]["fate"] == "trained"


async def test_a_conversation_that_goes_on_is_one_rollout_and_two_are_two(made: Made) -> None:
    async with made("twice") as agent:
        episode = await one(agent)
    assert len(episode.rollouts) == 1 and episode.metrics["agent/calls"] == 2.0
    async with made("apart") as agent:
        assert len((await one(agent)).rollouts) == 2


async def test_a_reward_may_score_each_call(made: Made) -> None:
    reward = {"function": f"{GRADERS}:each_call"}
    async with made("twice", reward=reward) as agent:
        episode = await one(agent)
    [rollout] = episode.rollouts
    assert episode.score == 3.0 and rollout.turns is not None
    assert rollout.turns.values.tolist() == [0.5, 1.5]
    assert rollout.turns.ends.tolist() == turn_ends(rollout).tolist()
    async with made("apart", reward=reward) as agent:  # its last conversation has one of the two calls
        with pytest.raises(DataError, match="has 1 turn rewards, but the policy had 2 turns"):
            await one(agent)


async def test_only_calls_that_are_to_be_trained_are(made: Made) -> None:
    async with made("apart", trained="with_tools") as agent:
        episode = await one(agent)
    assert len(episode.rollouts) == 1
    assert episode.metrics["agent/delivered_share"] == 0.5
    for left_out in ({"trained_agents": ["planner"]}, {"untrained_models": ["any"]}):
        async with made("once", **left_out) as agent:
            with pytest.raises(DataError, match="made no call that is trained"):
                await one(agent)


async def test_calls_outside_the_task_are_said_once_and_left_out_where_the_run_wants_so(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    async with made("apart") as agent:
        episodes = [await one(agent), await one(agent, at=1)]
    assert [len(episode.rollouts) for episode in episodes] == [2, 2]
    assert [episode.metrics["agent/side_calls"] for episode in episodes] == [1.0, 1.0]
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("side calls") == 1 and "1 of 2 calls, with 2 sampled tokens, are outside task '1'" in told
    assert "the message 'a title, please' and no tools" in told and 'trained = "main" or untrained_models' in told
    for answer, reads in (("reply", True), ("stdout", False)):
        async with made("title_last", answer=answer) as agent:
            await one(agent)
        told = " ".join(capsys.readouterr().out.split())
        assert ("Such a call gave the last reply, which is what rewards read." in told) is reads
    async with made("apart", trained="main") as agent:
        [rollout] = (await one(agent)).rollouts
    assert rollout.trained.sum() == 2 and "They are left out" in " ".join(capsys.readouterr().out.split())


async def test_where_nothing_can_be_called_the_task_s_all_is_trained_and_it_is_said(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    async with made("for_ever", limits={"calls": 3}, trained="main") as agent:
        assert (await one(agent)).metrics["agent/delivered_share"] == 1.0
        await one(agent)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("all calls of task '1' are trained: none shows the task's prompt") == 1


async def test_a_format_that_there_is_not_is_refused(made: Made) -> None:
    async with made(format="template") as agent:
        assert (await one(agent)).score == 1.0
    with pytest.raises(ConfigError, match="qwem3"):
        async with made(format="qwem3"):
            pass


async def test_history_is_as_sampled_or_as_sent(made: Made) -> None:
    spaced = Script("spaced", lambda task, seed: " 4 ")
    for history in ("as_sampled", "as_sent"):
        async with made("twice", history=history) as agent:
            assert (await one(agent, spaced)).metrics["agent/calls"] == 2.0


async def test_what_a_program_finds(made: Made, tmp_path: Path) -> None:
    (tmp_path / "template.toml").write_text('url = "{base_url}"\nother = {{}}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.txt").write_text("{base_url}")
    files = {
        "{home}/.agent/config.toml": {"template": str(tmp_path / "template.toml")},
        "notes.txt": {"text": "task {task.id}: {task.prompt} of {task.level}"},
        "data": {"copy_of": str(tmp_path / "folder")},
    }
    os.environ["SECRET_OF_OURS"] = "hidden"
    tasks = tasks_file(tmp_path, "levels.jsonl", level=3)
    command = ["{python}", "-S", str(PROGRAMS), "shows", "{task.prompt}", "{here}"]
    async with made(
        command=command,
        env={"MINE": "{seed}"},
        files=files,
        stdin="{task.messages}",
        here=str(tmp_path),
        tasks=str(tasks),
    ) as agent:
        await one(agent)
    [folder] = streams(tmp_path)
    seen = json.loads((folder / "stdout.txt").read_text())
    env, found = seen["env"], seen["files"]
    url = env["ANTHROPIC_BASE_URL"]
    assert env["OPENAI_BASE_URL"] == f"{url}/v1" and env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"]
    assert found["home/.agent/config.toml"] == f'url = "{url}/v1"\nother = {{{{}}}}\n'
    assert found["work/notes.txt"] == "task 1: two and two of 3"
    assert found["work/data/inner.txt"] == "{base_url}", "a copy is as it is"
    assert seen["argv"][2:] == ["two and two", str(tmp_path)]
    assert json.loads(seen["stdin"]) == [{"role": "user", "content": "two and two"}]
    assert env["MINE"] == "1" and "SECRET_OF_OURS" not in env
    assert json.loads(found["home/.atropos-task.json"])["prompt"] == "two and two"
    assert "answer" not in found["home/.atropos-task.json"]
    assert not Path(env["HOME"]).exists() and not Path(seen["cwd"]).exists(), "both are gone with the episode"


async def test_a_function_is_a_program_too(made: Made, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        f"import sys\nsys.path.insert(0, {str(PROGRAMS.parent)!r})\nimport agent_programs\n"
        "async def main(task):\n    agent_programs.say(agent_programs.user(task['prompt']))\n"
    )
    async with made(command=None, function="./agent.py:main", here=str(tmp_path)) as agent:
        assert (await one(agent)).score == 1.0
    with pytest.raises(ConfigError, match="could not be imported.*has no attribute 'absent'"):
        async with made(command=None, function="./agent.py:absent", here=str(tmp_path)):
            pass
    (tmp_path / "alone.py").write_text("here = True\n")
    local = {"sandbox": "local", "network": True}
    async with made(command=None, function="./alone.py:absent", here=str(tmp_path), **local) as agent:
        with pytest.raises(DataError, match="made no call.*exit code 1.*has no attribute 'absent'"):
            await one(agent)


async def test_a_program_that_fails_is_graded_as_it_left_things_or_fails_its_rollout(made: Made) -> None:
    async with made("fails") as agent:
        episode = await one(agent)
        assert (episode.score, episode.metrics["agent/programs_failed"]) == (1.0, 1.0)
    async with made("fails", on_failure="fail") as agent:
        with pytest.raises(DataError, match="the program failed: it ended with exit code 3 .* 'it is broken'"):
            await one(agent)
    async with made("never_calls") as agent:
        with pytest.raises(
            DataError, match="made no call that is trained; it ended with exit code 0 .*'nothing to say'"
        ):
            await one(agent)


async def test_a_command_that_cannot_be_started_is_named(made: Made) -> None:
    async with made(command=["no-such-agent"]) as agent:
        with pytest.raises(AtroposError, match="no-such-agent could not be started"):
            await one(agent)


@pytest.mark.parametrize(
    ("program", "limits", "limit"),
    [("never_ends", {"wall_s": 2.0}, "wall_time"), ("prints", {"output_mb": 0.1}, "output")],
)
async def test_a_program_ends_at_its_limits(
    made: Made, tmp_path: Path, program: str, limits: dict[str, float], limit: str
) -> None:
    wall_s, output_mb = limits.get("wall_s", 60.0), limits.get("output_mb", 8.0)
    async with made(program, limits={"wall_s": wall_s, "output_mb": output_mb}) as agent:
        episode = await one(agent)
    assert (episode.score, episode.metrics["agent/limits_reached"]) == (1.0, 1.0)
    [folder] = streams(tmp_path)
    assert json.loads((folder / "account.json").read_text())["exit"]["limit"] == limit
    assert (folder / "stdout.txt").stat().st_size <= output_mb * 1e6


def test_limits_reach_the_sandbox(tmp_path: Path) -> None:
    from atropos_agent_api.environment.program import limits_of

    options = AgentOptions.model_validate(
        {"command": ["a"], "tasks_from": "gsm8k", "limits": {"disk_mb": 2, "memory_mb": 3, "processes": 4}}
    )
    found = limits_of(options.limits)
    assert (found.disk_bytes, found.memory_bytes, found.processes) == (2_000_000, 3_000_000, 4)


@pytest.mark.parametrize(("limits", "code"), [({"calls": 3}, "call_limit"), ({"tokens": 5}, "token_limit")])
async def test_a_session_ends_at_its_limits(made: Made, tmp_path: Path, limits: dict[str, int], code: str) -> None:
    async with made("for_ever", limits=limits) as agent:
        episode = await one(agent)
    calls, tokens = limits.get("calls", 99), limits.get("tokens", 99)
    assert episode.metrics["agent/calls"] <= calls
    assert episode.metrics["agent/sampled_tokens"] <= tokens + 2
    assert (streams(tmp_path)[0] / "stdout.txt").read_text().strip() == code


@pytest.mark.parametrize(("sampling", "printed"), [("overrule", "overruled"), ("refuse", "unsupported_parameter")])
async def test_what_a_call_wants_of_sampling_is_overruled_or_refused(
    made: Made, tmp_path: Path, sampling: str, printed: str
) -> None:
    async with made("hot", sampling=sampling) as agent:
        episode = await one(agent)
    assert (streams(tmp_path)[0] / "stdout.txt").read_text().strip() == printed
    assert all(rollout.temperature == Sampling().temperature for rollout in episode.rollouts)


async def test_rewards_are_functions_plugins_and_the_environment_of_the_tasks(made: Made) -> None:
    async with made(reward={"function": f"{GRADERS}:file_is_right", "deadline_s": 20.0}) as agent:
        right, wrong = await one(agent), await one(agent, at=1)
    assert (right.score, right.correct, wrong.score, wrong.correct) == (1.0, True, 0.0, False)
    async with made(reward={"plugin": {"use": "numeric", "tolerance": 0.6}}) as agent:
        assert (await one(agent, at=1)).score == 1.0
    async with made(tasks_from={"use": "gsm8k", "problems": 3, "held_out": 2}) as agent:
        assert (len(agent.tasks("train")), len(agent.tasks("test"))) == (3, 2)
        oracle = Script("oracle", lambda task, seed: str(task.answer))
        assert (await one(agent, oracle)).correct is True
        assert (await one(agent)).correct is False


async def test_a_command_scores_a_copy_of_what_was_left(made: Made) -> None:
    async with made(reward={"command": ["{python}", str(GRADERS), "file"]}) as agent:
        right, wrong = await one(agent), await one(agent, at=1)
    assert (right.score, right.correct, wrong.correct) == (1.0, True, False)


async def test_a_command_scores_what_a_function_left(made: Made, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        f"import sys\nsys.path.insert(0, {str(PROGRAMS.parent)!r})\nimport agent_programs\n"
        "def main(task):\n    agent_programs.once()\n"
    )
    reward = {"command": ["{python}", str(GRADERS), "file"]}
    async with made(command=None, function="./agent.py:main", here=str(tmp_path), reward=reward) as agent:
        assert (await one(agent)).score == 1.0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("raises", "ended with exit code 1: ValueError: there is no such thing"),
        ("late", "gave no answer within 2 s"),
        ("a word", "as its last line, gave 'a word', which is not a number"),
        ("NaN", "gave nan, which is not a finite number"),
    ],
)
async def test_a_command_that_gives_no_score_is_named(made: Made, argument: str, message: str) -> None:
    deadline_s = 2.0 if argument == "late" else 60.0
    async with made(reward={"command": ["{python}", str(GRADERS), argument], "deadline_s": deadline_s}) as agent:
        with pytest.raises(AtroposError, match=message):
            await one(agent)


async def test_a_command_whose_file_was_changed_meanwhile_scores_nothing(made: Made, tmp_path: Path) -> None:
    grader = tmp_path / "grade.py"
    grader.write_text("print(0)\n")
    async with made(reward={"command": ["{python}", str(grader)]}) as agent:
        assert (await one(agent)).score == 0.0
        grader.write_text("print(1)\n")
        with pytest.raises(ConfigError, match="grade.py, which grades, has changed since the run began"):
            await one(agent)


async def test_a_reward_that_is_late_fails_the_rollout(made: Made) -> None:
    async with made(reward={"function": f"{GRADERS}:never_ends", "deadline_s": 1.0}) as agent:
        with pytest.raises(AtroposError, match="no answer within 1 s"):
            await one(agent)


GRADES = """
def by_answer(case):
    return {"4": -1.0, "6": 1.0}[case.task.answer]
"""


@pytest.mark.parametrize("worst", [0.0, -3.0])
async def test_a_program_that_makes_grading_fail_gets_the_worst_score_and_why_is_recorded(
    made: Made, tmp_path: Path, worst: float
) -> None:
    (tmp_path / "grade.py").write_text(GRADES)
    reward = {"function": f"{tmp_path}/grade.py:by_answer", "worst": worst}
    async with made("leaves_much", reward=reward, limits={"disk_mb": 1}) as agent:
        first = await one(agent, at=1)
    async with made("once", reward=reward) as agent:
        low = await one(agent)
        agent._options = agent._options.model_copy(
            update={"command": ("{python}", "-S", str(PROGRAMS), "leaves_much"), "limits": LimitOptions(disk_mb=1)}
        )
        second = await one(agent, at=1)
    assert (first.score, low.score, second.score) == (worst, -1.0, min(worst, -1.0)), "no way out of a bad score"
    assert (first.correct, first.metrics["agent/not_graded"], low.metrics["agent/not_graded"]) == (False, 1.0, 0.0)
    account = json.loads((streams(tmp_path)[0] / "account.json").read_text())
    assert account["not_graded"] == "it left more than 1 MB, its limit of the disk"


NO_NUMBER = Script("no number", lambda task, seed: "x")
FAILS = """
import json, sys, time
from pathlib import Path
def of(work):
    text = Path(work, "answer.txt").read_text()
    if text == "late":
        time.sleep(600)
    return float(text)
def by_file(case):
    return of(case.work)
if __name__ == "__main__":
    print(of(json.load(sys.stdin)["work"]))
"""


@pytest.mark.parametrize("kind", ["function", "command"])
async def test_a_reward_that_fails_on_what_one_program_left_gives_it_the_worst_score(
    made: Made, tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "grade.py"
    file.write_text(FAILS)
    how = {"function": f"{file}:by_file"} if kind == "function" else {"command": ["{python}", str(file)]}
    deadline_s = 20.0 if kind == "function" else 2.0
    async with made(reward={**how, "worst": -2.0, "deadline_s": deadline_s}) as agent:
        with pytest.raises(
            AtroposError, match="ValueError"
        ):  # it has not scored yet, so it may be the reward that is broken
            await one(agent, NO_NUMBER)
        good = await one(agent)
        bad = await one(agent, NO_NUMBER if kind == "function" else Script("late", lambda task, seed: "late"))
    assert (good.score, good.metrics["agent/not_graded"]) == (4.0, 0.0)
    assert (bad.score, bad.correct, bad.metrics["agent/not_graded"]) == (-2.0, False, 1.0)
    told = [json.loads((one / "account.json").read_text()).get("not_graded", "") for one in streams(tmp_path)]
    assert [bool(text) for text in told] == [False, False, True]
    assert ("could not convert" if kind == "function" else "gave no answer within 2 s") in told[2]


async def test_a_reward_that_fails_can_fail_the_rollout(made: Made, tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(FAILS)
    async with made(reward={"function": f"{tmp_path}/grade.py:by_file", "on_error": "fail"}) as agent:
        assert (await one(agent)).score == 4.0
        with pytest.raises(AtroposError, match="ValueError"):
            await one(agent, NO_NUMBER)


async def test_chained_links_are_graded(made: Made) -> None:
    async with made("leaves_links", reward={"command": ["{python}", str(GRADERS), "file"]}) as agent:
        assert (await one(agent)).correct is True


async def test_the_answer_is_the_last_reply_or_what_was_printed(made: Made) -> None:
    async with made("fails", answer="stdout", reward={"plugin": "exact"}) as agent:
        assert (await one(agent)).score == 1.0
    async with made("hot", answer="stdout") as agent:
        assert (await one(agent)).score == 0.0, "it printed something else"
    async with made("hot", answer="reply") as agent:
        assert (await one(agent)).score == 1.0


async def test_tasks_are_held_out_by_share_or_by_file(made: Made, tmp_path: Path) -> None:
    more = tasks_file(tmp_path, "more.jsonl")
    async with made(test_tasks=str(more), held_out=0.1) as agent:
        assert [len(agent.tasks("train")), len(agent.tasks("test"))] == [2, 2]
    async with made(held_out=0.999) as agent:
        assert [len(agent.tasks("train")), len(agent.tasks("test"))] == [0, 2]


async def test_so_many_programs_run_at_once_and_no_more(made: Made) -> None:
    """The first holds its call until a second one is there."""
    at_once, most = 0, 0

    class Counting(ScriptedPolicy):
        async def _before_replying(self, seed: int) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await until(lambda: most > 1, "a second program")
            await asyncio.sleep(0.2)
            at_once -= 1

    async with made(concurrency=2) as agent:
        task = agent.tasks("train")[0]
        await asyncio.gather(*(agent.rollout(task, Counting(FOUR, task), seed=seed) for seed in range(5)))
    assert most == 2


async def test_concurrency_has_no_effect_on_a_deterministic_run_and_is_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="concurrency has no effect with deterministic = true"):
        async with made(concurrency=2, deterministic=True):
            pass


async def test_so_many_folders_of_streams_are_kept(made: Made, tmp_path: Path) -> None:
    async with made(keep_streams=2) as agent:
        for seed in range(4):
            await one(agent, seed=seed)
    assert [path.name[:6] for path in streams(tmp_path)] == ["000002", "000003"]
    async with made(keep_streams=2) as agent:
        await one(agent)
    assert [path.name[:6] for path in streams(tmp_path)] == ["000003", "000004"], "a resumed run continues"


async def test_a_sandbox_that_cannot_hold_a_program_to_the_api_is_refused_where_it_was_named(made: Made) -> None:
    with pytest.raises(ConfigError, match="'process' cannot restrict a program to the API"):
        async with made(sandbox={"use": "process"}, network=False):
            pass


async def test_a_rollout_that_is_cancelled_leaves_no_program_and_its_session_is_over(
    made: Made, tmp_path: Path
) -> None:
    async with made("never_ends") as agent:
        rollout = asyncio.create_task(one(agent))
        await until(lambda: list(tmp_path.glob("agents/mine/*/stdout.txt")), "the streams of the program")

        def programs() -> list[psutil.Process]:
            found = []
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it may have ended just now
                    found += [child] if "never_ends" in child.cmdline() else []
            return found

        await until(programs, "the program")
        below = programs()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        _, alive = psutil.wait_procs(below, 60.0)
        assert not alive


async def test_a_call_after_the_episode_gets_409_and_one_without_the_key_401(made: Made, tmp_path: Path) -> None:
    command = ["{python}", "-S", str(PROGRAMS), "shows"]
    async with made(command=command) as agent:
        await one(agent)
        env = json.loads((streams(tmp_path)[0] / "stdout.txt").read_text())["env"]
        url, key = f"{env['OPENAI_BASE_URL']}/chat/completions", env["OPENAI_API_KEY"]
        body = {"model": "any", "messages": [{"role": "user", "content": "late"}]}
        async with httpx.AsyncClient() as client:
            late = await client.post(url, json=body, headers={"Authorization": f"Bearer {key}"})
            stranger = await client.post(url, json=body, headers={"Authorization": "Bearer sk-guessed"})
    assert (late.status_code, stranger.status_code) == (409, 401)


async def test_the_same_seed_gives_the_same_episode(made: Made) -> None:
    noise = Script("noise", lambda task, seed: f"{seed}")
    async with made("twice") as agent:
        first, again, other = await one(agent, noise), await one(agent, noise), await one(agent, noise, seed=2)
    assert first.messages == again.messages != other.messages
    assert (first.rollouts[0].tokens == again.rollouts[0].tokens).all()


async def test_a_model_elsewhere_answers_in_the_policys_place_and_nothing_is_trained(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote server is another of ours, with its own key."""
    sessions = Sessions()
    elsewhere = await open_agent_server(sessions, "theirs")
    task = Task("1", ())
    policy = ScriptedPolicy(FOUR, task)
    theirs = sessions.open(policy, TemplateFormat(policy, None), SessionOptions(), seed=1, name="elsewhere")
    monkeypatch.setenv("THEIR_KEY", theirs.key)
    baseline = {"url": f"{elsewhere.url}/v1", "model": "theirs", "key_variable": "THEIR_KEY"}
    try:
        async with made("shows", baseline=baseline) as agent:
            episode = await one(agent, Script("silent", lambda task, seed: "not asked"))
    finally:
        await elsewhere.close()
    assert episode.messages[-1]["content"] == "4"
    assert (episode.metrics["agent/calls"], episode.metrics["agent/baseline_tokens"]) == (1.0, 2.0)
    assert not any(rollout.trained.any() or rollout.sampled.any() for rollout in episode.rollouts)
    assert theirs.key not in (streams(tmp_path)[0] / "stdout.txt").read_text()


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        (Sampling(), {"top_p": None, "top_k": None, "min_p": None}),
        (Sampling(top_p=0.9, top_k=20, min_p=0.1), {"top_p": 0.9, "top_k": 20, "min_p": 0.1}),
    ],
)
async def test_a_baseline_samples_as_the_run_does_where_the_run_says_how(
    made: Made, sampling: Sampling, sent: dict[str, float | None]
) -> None:
    """The remote server records what its client asked of it: what an API does not know, it can refuse."""
    bodies: list[dict[str, Any]] = []

    async def theirs(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(json.loads((await receive())["body"]))
        reply = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(theirs, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve([listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    try:
        async with made(baseline={"url": url, "model": "theirs"}) as agent:
            task = agent.tasks("train")[0]
            policy = ScriptedPolicy(FOUR, task)
            policy.sampling = sampling
            await agent.rollout(task, policy, seed=1)
    finally:
        server.should_exit = True
        await serving
    [body] = bodies
    assert {name: body.get(name) for name in sent} == sent


async def test_a_baseline_that_refuses_is_named_and_one_is_never_trained(made: Made, tmp_path: Path) -> None:
    elsewhere = await open_agent_server(Sessions(), "theirs")
    baseline = {"url": f"{elsewhere.url}/v1", "model": "theirs"}
    try:
        async with made(baseline=baseline) as agent:
            with pytest.raises(AtroposError, match="the baseline at .* failed: status 401"):
                await one(agent)
    finally:
        await elsewhere.close()
    with pytest.raises(ConfigError, match="environment variable NOT_SET, which is not set"):
        async with made(baseline={**baseline, "key_variable": "NOT_SET"}):
            pass
    options = AgentOptions.model_validate({"command": ["a"], "tasks_from": "gsm8k", "baseline": baseline})
    with pytest.raises(ConfigError, match="a baseline cannot be trained"):
        build(options, RunContext(tmp_path, TOY_MODEL, is_trained=True))


async def test_a_task_with_half_a_surrogate_pair_reaches_its_program_with_a_mark_there(
    made: Made, tmp_path: Path
) -> None:
    tasks = tasks_file(tmp_path, "odd.jsonl", word="half \ud800")
    options = {
        "command": ["{python}", "-S", str(PROGRAMS), "repeats", "{task.word}"],
        "env": {"WORD": "{task.word}"},
        "stdin": "{task.word}",
    }
    async with made(tasks=str(tasks), **options) as agent:
        await one(agent)
    assert json.loads((streams(tmp_path)[0] / "stdout.txt").read_text()) == ["half \ufffd"] * 3 + [TASKS[0]]


async def test_a_task_with_a_zero_character_is_given_to_programs_that_read_it_from_a_file(
    made: Made, tmp_path: Path
) -> None:
    tasks = tasks_file(tmp_path, "odd.jsonl", word="a \0")
    tasks.write_text(tasks.read_text().replace("two and two", "a \\u0000"))
    async with made(tasks=str(tasks), stdin="{task.word}") as agent:
        assert (await one(agent)).rollouts
    async with made(tasks=str(tasks), env={"WORD": "{task.word}"}) as agent:
        with pytest.raises(DataError, match="task '1' has a zero character, which no argument"):
            await one(agent)
