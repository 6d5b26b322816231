"""Environments that are stepped: how an action is read, whose rewards are whose, and episodes in a process that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from dataclasses import replace

import psutil
import pytest
from pydantic import ValidationError

from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, RemoteError, WorkerLost
from atropos_core.turn_rewards import turn_ends
from atropos_core.types import Task
from atropos_env_kit.actions import ActionReader
from atropos_env_kit.step_host import AT_ONCE, Shown, StepHost
from atropos_env_kit.step_process import StepProcess
from atropos_env_kit.stepping import (
    Match,
    Stepped,
    SteppedEnvironment,
    SteppingOptions,
    Turn,
    run_matches,
)
from atropos_testing.scripted import Script, ScriptedPolicy
from tests.waiting import has_ended, until

HOSTED = """
import os, random, time
from atropos_env_kit.step_host import Shown, StepHost

class Dice:
    '''Shows a number that it draws at each step; the reward is that number. Ends after five steps.'''
    def __init__(self, name, parameters):
        if name == "broken":
            raise OSError("no dice here")
        if name == "framed":
            raise LookupError("\\n*****\\n  Resource 'dice' not found.\\n*****")
        self.sides, self.always = parameters.get("sides", 1000), parameters.get("always", "")
        self.steps = 0
    def reset(self, seed):
        return Shown(0, f"rolled {random.randrange(self.sides)}")
    def step(self, action):
        self.steps += 1
        if action == "hang":
            time.sleep(600)
        if action.startswith("raise") or action + self.always == "always":
            random.random()
            kinds = {"raise lost": ConnectionError, "raise path": FileNotFoundError, "raise exit": SystemExit}
            raise kinds.get(action, KeyError)("mine " * 999)
        if action == "slowly":
            time.sleep(0.05)
        rolled = os.getpid() if action == "pid" else random.randrange(self.sides)
        return Shown(0, f"rolled {rolled}", [rolled], ended=self.steps == 5)

call = StepHost(Dice, lambda: ["broken", "framed", "dice"]).call
"""


@pytest.fixture
async def process(tmp_path, monkeypatch):
    """Makes processes of the environment above; all are closed at the end."""
    (tmp_path / "hosted_of_the_stepping_test.py").write_text(HOSTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[StepProcess] = []

    def make(name: str = "dice", deadline_s: float = 30.0, **parameters: object) -> StepProcess:
        options = SteppingOptions(step_deadline_s=deadline_s)
        made.append(StepProcess("hosted_of_the_stepping_test:call", name, parameters, options))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def hosts() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "hosted_of_the_stepping_test" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


async def run(stepped: Stepped, *actions: str, seed: int = 1) -> list[str]:
    """The shown texts, from the first to the last."""
    turns = [await stepped.reset(seed)]
    for action in actions:
        turns.append(await stepped.step({"role": "assistant", "content": action}, action))
    return [turn.messages[0]["content"] for turn in turns]


# -- actions


@pytest.fixture
async def reader():
    """Makes readers; all are closed at the end."""
    made: list[ActionReader] = []

    def make(deadline_s: float = 30.0, **options: object) -> ActionReader:
        made.append(ActionReader(SteppingOptions(**options), deadline_s=deadline_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.mark.parametrize(
    ("reply", "action", "pattern", "found"),
    [
        (" all of it\n", "reply", None, " all of it\n"),
        ("", "reply", None, ""),
        ("\\boxed{1} or \\boxed{2}.", "boxed", None, "2"),
        ("\\boxed{\\frac{1}{2}} and \\boxed{", "boxed", None, "\\frac{1}{2}"),
        ("\\boxed{a \\boxed{b}}", "boxed", None, "b"),
        ("\\boxed{}", "boxed", None, ""),
        ("boxed{1}", "boxed", None, None),
        ("\\boxed{1", "boxed", None, None),
        ("3 then 4.", "pattern", r"\d", "4"),
        ("go north", "pattern", r"go (\w+)", "north"),
        ("stay", "pattern", r"go (\w+)", None),
        ("go", "pattern", r"go( \w+)?", None),
    ],
)
async def test_what_action_a_reply_takes(reader, reply, action, pattern, found):
    assert await reader(action=action, pattern=pattern).action_of(reply) == found


async def test_a_pattern_that_backtracks_holds_no_other_rollout_and_is_named(reader):
    backtracking = reader(action="pattern", pattern=r"(a+)+$", deadline_s=3.0)
    assert await backtracking.action_of("aaa") == "aaa"
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    beating = asyncio.ensure_future(beat())
    with pytest.raises(
        DataError, match=r"(?s)pattern '\(a\+\)\+\$' was looked for in a reply of 41 characters.*backtracks"
    ):
        await backtracking.action_of("a" * 40 + "b")
    beating.cancel()
    assert beats > 5, "the loop went on meanwhile"
    assert await backtracking.action_of("b aa") == "aa", "the next reply has a process again"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"action": "pattern"}, "go together"),
        ({"pattern": "x"}, "go together"),
        ({"action": "pattern", "pattern": "("}, "pattern is not a regular expression"),
        ({"template": "[action]"}, r"template has no \{action\}"),
        ({"max_turns": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        SteppingOptions(**options)


# -- matches


class Alternating(Stepped):
    """Two sides in turn. A step costs the side that took it 1, and gives the other 2."""

    def __init__(self, steps: int, said: list[str], fails_at: int | None = None) -> None:
        self.steps, self.said, self.fails_at, self.closed = steps, said, fails_at, 0

    async def reset(self, seed: int) -> Turn:
        return self.turn()

    async def step(self, reply, action):
        if len(self.said) == self.fails_at:
            raise RemoteError("the board is gone")
        self.said.append(action)
        side = (len(self.said) - 1) % 2
        return self.turn([-1.0, 2.0] if side == 0 else [2.0, -1.0])

    def turn(self, rewards=()):
        text = {"role": "user", "content": f"{len(self.said)} steps so far"}
        return Turn(len(self.said) % 2, (text,), rewards, ended=len(self.said) == self.steps)

    async def close(self) -> None:
        self.closed += 1


TASK = Task("one", ({"role": "user", "content": "begin"},), data={"seed": 1})


def policy(reply: str = "north") -> ScriptedPolicy:
    return ScriptedPolicy(Script("test", lambda task, seed: reply), TASK)


async def episodes_of(stepped: Stepped, reply: str = "north", **options) -> list:
    reader = ActionReader(SteppingOptions(**options))
    [found] = await run_matches([Match(stepped, policy(reply), reader, seed=3)], [1])
    await reader.close()
    if isinstance(found, BaseException):
        raise found
    return found


async def test_each_side_has_its_own_messages_tokens_and_rewards():
    first, second = await episodes_of(Alternating(3, []))
    assert [first.score, second.score] == [0.0, 3.0]
    shown = [[message["content"] for message in one.messages if message["role"] == "user"] for one in (first, second)]
    assert shown == [["0 steps so far", "2 steps so far"], ["1 steps so far"]]
    assert [len(one.rollouts) for one in (first, second)] == [1, 1]
    assert [int(one.rollouts[0].sampled.sum()) for one in (first, second)] == [2 * 6, 6]
    assert [one.metrics["steps/turns"] for one in (first, second)] == [2.0, 1.0]


async def test_a_side_that_never_replies_has_no_episode_and_a_reward_before_the_first_reply_counts():
    assert len(await episodes_of(Alternating(1, []))) == 1
    _, second = await episodes_of(Alternating(2, []))
    assert second.score == 2.0 - 1.0


async def test_a_reward_of_a_step_is_the_turn_reward_of_the_last_reply_of_its_side():
    first, second = await episodes_of(Alternating(4, []))
    [turns], [others] = ([one.turns for one in each.rollouts] for each in (first, second))
    assert turns.values.tolist() == [-1.0 + 2.0, -1.0 + 2.0]
    assert others.values.tolist() == [-1.0 + 2.0, -1.0], "2.0 came before its first reply: that is of the outcome"
    assert [first.score, second.score] == [2.0, 2.0]
    for each in (first, second):
        assert each.rollouts[0].turns.ends.tolist() == turn_ends(each.rollouts[0]).tolist()


async def test_an_episode_that_ends_as_it_begins_fails_by_name():
    with pytest.raises(DataError, match="ended as it began"):
        await episodes_of(Alternating(0, []))


async def test_the_action_is_put_into_the_template_and_one_that_is_not_found_is_empty_and_counted():
    said: list[str] = []
    options = {"action": "pattern", "pattern": r"go (\w+)", "template": "\\boxed{{action}}"}
    await episodes_of(Alternating(1, said), "go north", **options)
    [episode] = await episodes_of(Alternating(2, said), "stay", **options)
    assert said == ["\\boxed{north}", ""]
    assert episode.metrics["steps/without_action"] == 1.0


async def test_the_system_message_comes_first_and_an_episode_is_cut_off_at_max_turns():
    first, second = await episodes_of(Alternating(99, []), system="Be brief.", max_turns=2)
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [one.metrics["steps/turns"] for one in (first, second)] == [2.0, 2.0]
    assert first.metrics["steps/cut_off"] == second.metrics["steps/cut_off"] == 1.0


async def test_a_score_of_success_is_correct():
    first, second = await episodes_of(Alternating(3, []), success=3.0)
    assert [first.correct, second.correct] == [False, True]


async def test_one_match_that_fails_leaves_the_others_alone_and_all_are_closed():
    matches = [Alternating(3, []), Alternating(3, [], fails_at=1), Alternating(2, [])]
    found = await run_matches(
        [Match(one, policy(), ActionReader(SteppingOptions()), seed=at) for at, one in enumerate(matches)], [1, 1, 1]
    )
    assert [len(one) if isinstance(one, list) else str(one) for one in found] == [2, "the board is gone", 2]
    assert [one.closed for one in matches] == [1, 1, 1]


def test_tasks_are_seeds_that_differ_by_split_index_and_option():
    class Made(SteppedEnvironment):
        def stepped(self) -> Stepped:
            raise NotImplementedError

    first, other = (Made("dice", SteppingOptions(tasks=30, held_out=5, seed=seed)) for seed in (0, 1))
    seeds = [[task.data["seed"] for task in first.tasks(split)] for split in ("train", "test")]
    assert [len(of) for of in seeds] == [30, 5]
    assert len({*seeds[0], *seeds[1]}) == 35
    assert not {*seeds[0], *seeds[1]} & {task.data["seed"] for task in other.tasks("train")}
    assert first.tasks("train")[3] == Made("dice", SteppingOptions(tasks=30)).tasks("train")[3]


# -- episodes in a process


async def test_an_episode_is_the_same_alone_and_among_others_and_follows_its_seed(process):
    one = process()
    alone = await run(one.stepped(), "a", "b", "c")
    many = await asyncio.gather(*(run(one.stepped(), "a", "b", "c", seed=seed) for seed in (1, 2, 1, 3)))
    assert many[0] == many[2] == alone
    assert len({tuple(each) for each in many}) == 3
    assert len({*alone}) == 4, "it draws on, and does not begin again with each step"


async def test_what_a_killed_process_knew_is_stepped_again_and_the_step_it_was_at_fails_by_name(process):
    one = process()
    undisturbed = await run(one.stepped(), "a", "b", "c", "slowly")
    idle, busy = one.stepped(), one.stepped()
    seen = [await idle.reset(1), await busy.reset(1)]
    seen += [await idle.step({}, action) for action in ("a", "b")]
    at_it = asyncio.ensure_future(busy.step({}, "hang"))
    await asyncio.sleep(0.3)
    [host] = hosts()
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        await at_it
    seen += [await idle.step({}, action) for action in ("c", "slowly")]
    assert [turn.messages[0]["content"] for turn in seen[:1] + seen[2:]] == undisturbed
    assert len(hosts()) == 1 and hosts()[0].pid != host.pid


async def test_kills_at_random_fail_episodes_by_name_and_change_no_other(process):
    one = process()
    actions = ["slowly", "slowly", "slowly", "slowly"]
    undisturbed = [await run(one.stepped(), *actions, seed=seed) for seed in range(8)]
    rng, ended = random.Random(0), asyncio.Event()

    async def kill() -> int:
        kills = 0
        while not ended.is_set():
            await asyncio.sleep(rng.uniform(0.2, 0.6))
            for host in hosts():
                os.kill(host.pid, signal.SIGKILL)
                kills += 1
        return kills

    killing = asyncio.ensure_future(kill())
    outcomes = await asyncio.gather(
        *(run(one.stepped(), *actions, seed=seed) for seed in range(8)), return_exceptions=True
    )
    ended.set()
    assert await killing >= 2
    lost = [each for each in outcomes if isinstance(each, BaseException)]
    assert lost and all(isinstance(each, WorkerLost) and "SIGKILL" in str(each) for each in lost)
    assert all(each == then for each, then in zip(outcomes, undisturbed, strict=True) if isinstance(each, list))
    assert await run(one.stepped(), *actions, seed=3) == undisturbed[3]


async def test_a_step_that_hangs_fails_at_its_deadline_and_costs_no_other_episode(process):
    one = process(deadline_s=1.0)
    other, hanging = one.stepped(), one.stepped()
    await asyncio.gather(other.reset(1), hanging.reset(1))
    with pytest.raises(DeadlineExceeded):
        await hanging.step({}, "hang")
    then = await other.step({}, "a")
    assert then.messages[0]["content"] == (await run(one.stepped(), "a"))[-1]


async def test_a_caller_that_is_cancelled_leaves_the_process_at_its_step(process):
    one = process()
    await run(one.stepped())
    [before] = hosts()
    stepped = one.stepped()
    await stepped.reset(1)
    going = asyncio.ensure_future(stepped.step({}, "slowly"))
    for _ in range(5):  # turns of the loop: it is asked, and has not answered
        await asyncio.sleep(0)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert (await run(one.stepped(), "a"))[0]
    assert [host.pid for host in hosts()] == [before.pid]


async def test_closing_ends_what_is_going_on_and_starts_nothing(process):
    one = process()
    stepped = [one.stepped() for _ in range(3)]
    await asyncio.gather(*(each.reset(1) for each in stepped))
    going = [asyncio.ensure_future(each.step({}, "hang")) for each in stepped]
    await asyncio.sleep(0.2)
    await one.close()
    assert [type(each) for each in await asyncio.gather(*going, return_exceptions=True)] == [asyncio.CancelledError] * 3
    await asyncio.sleep(0.2)
    assert hosts() == []


@pytest.mark.parametrize("raises", ["raise", "raise path", "raise exit"])
async def test_an_action_that_the_environment_raises_on_is_taken_as_an_empty_one_and_the_policy_sees_the_error(
    process, raises, capsys
):
    one = process()
    empty, raised = await run(one.stepped(), "a", "", "b", "", "c"), one.stepped()
    turns = [await raised.reset(1)]
    for action in ("a", raises, "b", raises, "c"):
        turns.append(await raised.step({}, action))
    shown = [turn.messages[0]["content"] for turn in turns]
    assert [text.splitlines()[-1] for text in shown] == empty, "no half of the step that raised is left"
    assert [text.startswith("error: ") and "mine" in text for text in shown] == [False, False, True, False, True, False]
    assert max(map(len, shown)) < 1100, "an error that is long is cut"
    assert [bool(turn.raised) for turn in turns] == [False, False, True, False, True, False]
    assert [turn.ended for turn in turns] == [False] * 5 + [True]
    assert capsys.readouterr().err.count("dice raised on an action: ") == 1


async def test_an_action_is_not_taken_if_the_environment_raises_on_an_empty_one_too(process, capsys):
    one = process(always="always")
    without = await run(one.stepped(), "a", "b")
    stepped = one.stepped()
    turns = [await stepped.reset(1)]
    for action in ("a", "raise", "raise", "", "b"):
        turns.append(await stepped.step({}, action))
    shown = [turn.messages[0]["content"] for turn in turns]
    assert [shown[0], shown[1], shown[5]] == without
    assert all("error: KeyError" in text and "rolled" not in text for text in shown[2:5])
    assert [(turn.side, list(turn.rewards), turn.ended) for turn in turns[2:5]] == [(0, [], False)] * 3
    assert "on an empty action too" in capsys.readouterr().err


async def test_errors_on_actions_are_the_same_again_in_another_process(process):
    one = process()
    undisturbed = await run(one.stepped(), "a", "raise", "b")
    stepped = one.stepped()
    seen = [await stepped.reset(1), await stepped.step({}, "a"), await stepped.step({}, "raise")]
    [host] = hosts()
    host.kill()
    await until(lambda: has_ended(host.pid), "the end of the process")
    await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
    seen.append(await stepped.step({}, "b"))
    assert [turn.messages[0]["content"] for turn in seen] == undisturbed


async def test_what_no_action_is_at_fault_for_fails_its_episode_and_nothing_else(process):
    one = process()
    with pytest.raises(RemoteError, match="ConnectionError: mine"):
        await run(one.stepped(), "raise lost")
    assert len(await run(one.stepped(), "a")) == 2


async def test_replies_that_an_environment_raised_on_are_counted_by_side():
    class Raising(Alternating):
        async def step(self, reply, action):
            turn = await super().step(reply, action)
            return replace(turn, raised="KeyError" if len(self.said) in (1, 2, 3) else "")

    first, second = await episodes_of(Raising(5, []))
    assert [one.metrics["steps/raised"] for one in (first, second)] == [2.0, 1.0]


async def test_an_episode_that_is_not_its_seed_and_actions_fails_rather_than_go_on_as_another(process):
    one = process()
    stepped = one.stepped()
    await stepped.reset(1)
    await stepped.step({}, "pid")
    [host] = hosts()
    host.kill()
    await until(lambda: has_ended(host.pid), "the end of the process")
    await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
    with pytest.raises(RemoteError, match="the episode is another"):
        await stepped.step({}, "a")


async def test_an_environment_that_is_not_there_or_cannot_be_made_is_one_error(process):
    with pytest.raises(ConfigError, match="(?s)test has no environment 'dise'.*Did you mean 'dice'"):
        await process("dise", sides="x").open("test", "its table")
    with pytest.raises(
        ConfigError, match="(?s)test makes no broken with these options: .*no dice here.*Check its table, and"
    ):
        await process("broken").open("test", "its table")
    with pytest.raises(ConfigError, match="with these options: .*LookupError: Resource 'dice' not found"):
        await process("framed").open("test", "its table")
    await process("dice").open("test", "its table")


def test_the_host_keeps_so_many_episodes_and_lets_go_of_those_that_ended():
    made = []

    class Ends:
        def __init__(self, name, parameters):
            made.append(name)

        def reset(self, seed):
            return Shown(0, "begin")

        def step(self, action):
            return Shown(0, "end", [1.0], ended=action == "end")

    host = StepHost(Ends, list)
    for number in range(AT_ONCE + 1):
        host.call("step", '{"name": "x", "parameters": {}}', number, 1, [], "")
    assert len(host._episodes) == AT_ONCE and 0 not in host._episodes
    assert host.call("step", '{"name": "x", "parameters": {}}', 5, 1, ["end"], "begin")["ended"]
    assert 5 not in host._episodes and len(made) == AT_ONCE + 1
