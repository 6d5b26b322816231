"""From a draw to a scored group: what fails is data, what ends the run is not."""

from __future__ import annotations

import asyncio
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atropos_env_gsm8k
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.conversation import Conversation
from atropos_core.errors import DataError, DeadlineExceeded, EventLoopBlocked, MessageDropped, ProcessDied
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Engine, Environment
from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.rollouts.replies import whole_reply
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward, checked_group
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive
from atropos_core.types import ABSTAINED, Episode, Failed, Sampling, Score, ScoredGroup, Task
from tests.unit import virtual_time
from tests.unit.parts import TOKENIZER, SayingEngine, SilentEngine, Words, draw, episode
from tests.wrong_groups import EPISODES, VALUES
from tests.wrong_groups import VOCABULARY as WRONG_VOCABULARY
from tests.wrong_groups import group as right_group

DEADLINE_S = 0.3


def rollout_runner(
    environment: Environment,
    *rewards: WeightedReward,
    engine: Engine | None = None,
    deterministic: bool = False,
    deadline_s: float = 30.0,
) -> RolloutRunner:
    return RolloutRunner(
        {"words": environment},
        rewards or [score()],
        engine or SayingEngine(),
        TOKENIZER,
        deadline_s=deadline_s,
        deterministic=deterministic,
    )


def score(weight: float = 1.0) -> WeightedReward:
    async def environment(task: Any, episodes: Sequence[Episode]) -> Any:
        return np.array([one.score for one in episodes], np.float32)

    return WeightedReward("environment", environment, weight, 10.0)


def reward(answer: Callable[[Sequence[Episode]], Any], weight: float = 1.0, name: str = "other") -> WeightedReward:
    async def ask(task: Any, episodes: Sequence[Episode]) -> Any:
        answered = answer(episodes)
        return await answered if asyncio.iscoroutine(answered) else answered

    return WeightedReward(name, ask, weight, DEADLINE_S)


async def run_one(rollout_runner: RolloutRunner, n: int = 4, number: int = 3, attempts: int = 1) -> ScoredGroup:
    keys = rollout_runner.schedule_keys(draw(number), n)
    return await rollout_runner.run(draw(number), keys, n, Sampling(max_tokens=8), attempts=attempts)


class Scripted(Words):
    """Runs as `how(seed)` says."""

    def __init__(self, how: Callable[[int], Any]) -> None:
        super().__init__()
        self._how = how

    async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
        made = self._how([derive(1003, member) for member in range(8)].index(seed))
        return await made if asyncio.iscoroutine(made) else made


class InGroups(Words):
    """Runs whole groups, as `how(n)` says."""

    def __init__(self, how: Callable[[int], Any]) -> None:
        super().__init__()
        self._how = how
        self.seeds: list[int] = []

    async def rollout_group(self, task: Any, policy: Any, n: int, *, seeds: Sequence[int]) -> Any:
        self.seeds = list(seeds)
        return self._how(n)


# -- rollouts


async def test_a_group_has_its_task_its_episodes_and_their_scores():
    engine = SayingEngine(lambda prompt, seed: "a" * (seed % 5))
    group = await run_one(rollout_runner(Words(), engine=engine))
    lengths = [derive(derive(1003, member), 0) % 5 for member in range(4)]
    assert group.draw == draw(3)
    assert group.task.id == "train-3"
    assert group.rewards.tolist() == lengths, "in the order of their members"
    assert group.rewards.dtype == np.float32
    assert [one.score for one in group.episodes] == lengths
    assert group.failed == ()
    assert group.advantages is None


async def test_a_reward_sees_the_whole_reply_and_the_group_keeps_its_parts(tmp_path):
    shutil.copytree(TOKENIZER.directory, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    )
    said: list[Any] = []

    async def seen(task: Any, episodes: Sequence[Episode]) -> Any:
        said.extend(whole_reply(one.messages[-1]) for one in episodes)
        return np.zeros(len(episodes), np.float32)

    engine = SayingEngine(lambda prompt, seed: "hm 4\n</think>\n5")
    runner = RolloutRunner(
        {"words": Words()},
        [score(), WeightedReward("seen", seen, 1.0, 10.0)],
        engine,
        ChatTokenizer(tmp_path / "model"),
        deadline_s=30.0,
        deterministic=False,
    )
    group = await run_one(runner, n=2)
    assert group.failed == ()
    assert group.rewards.tolist() == [1.0, 1.0], "the length of the content"
    assert said == ["hm 4\n</think>\n5"] * 2
    assert group.episodes[0].messages[-1] == {"role": "assistant", "content": "5", "reasoning_content": "hm 4"}


@pytest.mark.parametrize("value", [math.nan, math.inf, "4"])
async def test_a_score_that_is_no_number_is_named_with_its_environment_and_task(value):
    group = await run_one(rollout_runner(Scripted(lambda member: replace(episode(0.0), score=value))))
    assert {one.cause.partition(" is ")[0] for one in group.failed} == {
        "DataError: environment 'words', task 'train-3': episode.score"
    }


async def test_an_episode_that_abstains_is_left_to_the_other_rewards_or_out_of_its_group():
    def how(member: int) -> Episode:
        return replace(episode(0.0), metrics={ABSTAINED: 1.0}) if member < 2 else episode(float(member))

    own = WeightedReward("environment", EnvironmentReward(), 1.0, 10.0)
    group = await run_one(rollout_runner(Scripted(how), own))
    assert (group.rewards.tolist(), group.failed) == ([2.0, 3.0], ()), "neither a failure nor a part of the mean"
    group = await run_one(rollout_runner(Scripted(how), own, reward(lambda episodes: np.ones(len(episodes)))))
    assert group.rewards.tolist() == [1.0, 1.0, 3.0, 4.0]
    group = await run_one(rollout_runner(Scripted(lambda member: replace(episode(0.0), metrics={ABSTAINED: 1.0})), own))
    assert (group.rewards.tolist(), group.failed) == ([0.0] * 4, ()), "flat: nothing is trained"


async def test_the_seeds_of_a_group_derive_from_its_draw_alone():
    async def seeds() -> list[int]:
        engine = SayingEngine()
        await run_one(rollout_runner(Words(), engine=engine))
        return sorted(seeds[0] for _, _, seeds, _ in engine.requests)

    assert await seeds() == await seeds() == sorted(derive(derive(1003, member), 0) for member in range(4))


async def test_a_rollout_that_raises_is_data_with_its_cause_and_its_trace():
    def how(member: int) -> Episode:
        if member == 1:
            raise KeyError("lost\nand more")
        return episode(float(member))

    group = await run_one(rollout_runner(Scripted(how)))
    assert group.rewards.tolist() == [0, 2, 3]
    [failed] = group.failed
    assert (failed.cause, failed.where) == ("KeyError: 'lost\\nand more'", "rollout")
    assert "test_runner.py" in failed.trace


async def test_the_cause_of_a_failure_is_one_line():
    def how(member: int) -> Episode:
        raise ValueError("first\nsecond")

    group = await run_one(rollout_runner(Scripted(how)), 1)
    assert group.failed[0].cause == "ValueError: first"


async def test_the_remedy_of_an_error_is_kept_in_its_one_line():
    def how(member: int) -> Episode:
        raise DataError("the row is empty.\nIt has no column.", remedy="Fill it,\n  or leave it out.")

    failed = (await run_one(rollout_runner(Scripted(how)), 1)).failed[0]
    assert failed.cause == "DataError: the row is empty. Fill it, or leave it out."


async def test_an_error_of_ours_needs_no_trace():
    def how(member: int) -> Episode:
        raise DataError("a broken task")

    group = await run_one(rollout_runner(Scripted(how)), 2)
    assert group.failed == (Failed("DataError: a broken task", "rollout"),) * 2
    assert group.rewards.shape == (0,)


async def test_a_rollout_that_says_itself_that_it_failed_is_kept_as_it_is():
    group = await run_one(
        rollout_runner(Scripted(lambda member: Failed("no luck", "tool") if member else episode(1.0))), 2
    )
    assert group.failed == (Failed("no luck", "tool"),)
    assert group.rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (None, "rollout() must return an Episode, not NoneType"),
        (1.0, "rollout() must return an Episode, not float"),
        (episode(float("nan")), "episode.score is nan: must be a number from -1e+09 to 1e+09"),
        (episode(float("-inf")), "episode.score is -inf: must be a number from -1e+09 to 1e+09"),
        (
            replace(episode(1.0), parts={"form": float("nan")}),
            "episode.parts['form'] is nan: must be a number from -1e+09 to 1e+09",
        ),
        (
            replace(episode(1.0), metrics={"turns": np.float32("inf")}),
            "episode.metrics['turns'] is inf: must be a number from -1e+30 to 1e+30",
        ),
    ],
)
async def test_what_is_no_scored_episode_is_a_failure_that_says_so(made, wanted):
    group = await run_one(rollout_runner(Scripted(lambda member: made)), 1)
    assert [one.cause for one in group.failed] == [f"DataError: environment 'words', task 'train-3': {wanted}"]


def test_a_rollout_past_its_deadline_is_cancelled_and_the_others_are_kept():
    ended: list[str] = []

    async def forever() -> Episode:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError("unreachable")

    how = Scripted(lambda member: forever() if member == 2 else episode(1.0))
    group = virtual_time.run(run_one(rollout_runner(how, deadline_s=DEADLINE_S)))
    assert len(group.episodes) == 3
    assert [one.cause for one in group.failed] == ["DeadlineExceeded: rollout() gave no answer within 0.3 s"]
    assert ended == ["cancelled"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_rollouts_that_wait_for_their_turn_spend_nothing_of_their_deadlines(deterministic):
    """Four of 0.2 s each, one at a time, within 0.3 s. In a deterministic run none may wait for another."""
    running = most = 0

    async def slow() -> Episode:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        return episode(1.0, "")

    environment = Scripted(lambda member: slow())
    environment.at_once = 1
    group = virtual_time.run(run_one(rollout_runner(environment, deadline_s=DEADLINE_S, deterministic=deterministic)))
    assert (len(group.episodes), most) == (4, 4 if deterministic else 1)


async def test_an_engine_that_is_late_fails_the_rollout_under_its_own_name():
    group = await run_one(rollout_runner(Words(), engine=SilentEngine(), deadline_s=DEADLINE_S), 1)
    assert "DeadlineExceeded" in group.failed[0].cause


async def test_a_rollout_that_awaits_something_cancelled_is_data_and_not_a_vanished_group():
    async def cancels_itself() -> Episode:
        helper = asyncio.ensure_future(asyncio.sleep(10))
        helper.cancel()
        await helper
        raise AssertionError("unreachable")

    group = await run_one(rollout_runner(Scripted(lambda member: cancels_itself() if member == 0 else episode(1.0))), 2)
    assert group.rewards.tolist() == [1.0]
    assert "rollout() awaited something that was cancelled" in group.failed[0].cause
    assert "cancels_itself" in group.failed[0].trace


async def test_a_timeout_of_the_environments_own_is_not_reported_as_the_runs_deadline():
    async def gives_up() -> Episode:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        raise AssertionError("unreachable")

    group = await run_one(rollout_runner(Scripted(lambda member: gives_up())), 1)
    assert group.failed[0].cause == "TimeoutError: "


async def test_code_that_blocks_the_event_loop_fails_its_own_rollout_alone():
    def how(member: int) -> Episode:
        if member == 0:
            raise EventLoopBlocked("mine.py:3 in f() blocked the event loop")
        return episode(1.0)

    group = await run_one(rollout_runner(Scripted(how)), 2)
    assert len(group.episodes) == 1
    assert "blocked the event loop" in group.failed[0].cause


async def test_code_that_blocks_the_event_loop_three_times_in_a_row_ends_the_run():
    def how(member: int) -> Episode:
        if member in (0, 1, 3, 4, 5):
            raise EventLoopBlocked("mine.py:3 in f() blocked the event loop")
        return episode(1.0)

    runner = rollout_runner(Scripted(how))
    assert len((await run_one(runner, 5)).failed) == 4, "one that does not block is between them"
    with pytest.raises(EventLoopBlocked, match=r"rollout\(\) of Scripted, 3 times in a row: mine.py:3"):
        await run_one(runner, 6)


@pytest.mark.parametrize("correct", ["no", 2, 0.5, "True"])
async def test_what_is_correct_is_true_false_or_none(correct: object):
    group = await run_one(rollout_runner(Scripted(lambda member: replace(episode(1.0), correct=correct))), 1)
    assert f"correct is {correct!r}, not True, False or None" in group.failed[0].cause


@pytest.mark.parametrize(("given", "kept"), [(np.True_, True), (0, False), (1.0, True), (None, None)])
async def test_numbers_that_are_true_or_false_are_kept_as_such(given: object, kept: bool | None):
    group = await run_one(rollout_runner(Scripted(lambda member: replace(episode(1.0), correct=given))), 1)
    assert group.episodes[0].correct is kept


async def test_a_process_that_died_is_no_rollouts_failure_but_the_runs():
    def how(member: int) -> Episode:
        raise ProcessDied("the engine is gone")

    with pytest.raises(ProcessDied, match="the engine is gone"):
        await run_one(rollout_runner(Scripted(how)))


@pytest.mark.parametrize("model", ["tiny", "tiny_tools"])
@pytest.mark.parametrize("in_groups", [False, True])
async def test_a_message_that_the_chat_template_drops_ends_the_run_with_the_names_of_environment_and_task(
    model: str, in_groups: bool
) -> None:
    class Talk(Words):
        async def rollout(self, task: Any, policy: Any, *, seed: int) -> Episode:
            talk = Conversation(policy, seed=seed)
            await talk.reply(*task.messages)
            await talk.reply({"role": "usr", "content": "Sure?"})
            return talk.episode(Score(1.0))

    class Groups(Talk):
        async def rollout_group(self, task: Any, policy: Any, n: int, *, seeds: Sequence[int]) -> Any:
            return [await self.rollout(task, policy, seed=seed) for seed in seeds]

    tokenizer = ChatTokenizer(Path(atropos_env_gsm8k.__file__).parent / model)
    runner = RolloutRunner(
        {"words": Groups() if in_groups else Talk()},
        [score()],
        SayingEngine(),
        tokenizer,
        deadline_s=30.0,
        deterministic=False,
    )
    with pytest.raises(MessageDropped, match="environment 'words', task 'train-3': the chat template of") as refused:
        await run_one(runner)
    assert "of the role 'usr'" in str(refused.value) and refused.value.remedy


# -- an environment's own rollout_group


class Once(Words):
    """Whatever is tried for the first time fails, under the seeds that derive from the draw."""

    def __init__(self, fail: Sequence[int]) -> None:
        super().__init__()
        self.first = [derive(1003, member) for member in fail]
        self.seen: list[int] = []

    async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
        self.seen.append(seed)
        if seed in self.first:
            raise ValueError("away")
        return episode(float(seed % 5))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_rollout_that_failed_is_run_again_in_its_place_under_a_seed_of_its_own(deterministic):
    environment = Once(fail=[1, 3])
    group = await run_one(rollout_runner(environment, deterministic=deterministic), attempts=2)
    seeds = [derive(1003, member) for member in range(4)]
    seeds[1], seeds[3] = derive(seeds[1], 1), derive(seeds[3], 1)
    assert group.rewards.tolist() == [seed % 5 for seed in seeds]
    assert [one.cause for one in group.failed] == ["ValueError: away"] * 2
    assert len(environment.seen) == 6


async def test_a_group_of_rollouts_is_run_again_as_a_whole():
    made = [[episode(1.0), ValueError("away")], [episode(2.0), episode(3.0)]]
    environment = InGroups(lambda n: made.pop(0))
    group = await run_one(rollout_runner(environment), n=2, attempts=3)
    assert group.rewards.tolist() == [2.0, 3.0] and len(group.failed) == 1 and not made


async def test_attempts_that_all_fail_leave_their_members_failed():
    group = await run_one(rollout_runner(Scripted(lambda member: ValueError())), n=2, attempts=3)
    assert not group.episodes and len(group.failed) == 6


@pytest.mark.parametrize("n", [1, 4])
async def test_an_environments_own_rollout_group_runs_groups_of_every_size(n):
    environment = InGroups(lambda n: [episode(float(member)) for member in range(n)])
    group = await run_one(rollout_runner(environment), n)
    assert group.rewards.tolist() == list(range(n))
    assert environment.seeds == [derive(1003, member) for member in range(n)]


async def test_members_of_rollout_group_may_fail_one_by_one():
    members = [episode(1.0), KeyError("mine"), Failed("own", "tool"), "nonsense"]
    group = await run_one(rollout_runner(InGroups(lambda n: members[:3])), 3)
    assert group.rewards.tolist() == [1.0]
    assert [(one.cause, one.where) for one in group.failed] == [("KeyError: 'mine'", "rollout"), ("own", "tool")]


@pytest.mark.parametrize("gives", [3, 5, 0])
async def test_a_rollout_group_of_another_size_fails_whole_and_says_the_counts(gives):
    group = await run_one(rollout_runner(InGroups(lambda n: [episode(1.0)] * gives)))
    assert group.episodes == ()
    assert len(group.failed) == 4
    assert group.failed[0].where == "rollout_group"
    assert f"called for 4 rollouts and gave {gives}" in group.failed[0].cause


@pytest.mark.parametrize("gives", [None, [episode(1.0), 3]])
async def test_a_rollout_group_that_gives_nonsense_fails_whole(gives):
    group = await run_one(rollout_runner(InGroups(lambda n: gives)), 2)
    assert [one.where for one in group.failed] == ["rollout_group"] * 2


async def test_a_process_that_died_inside_a_rollout_group_ends_the_run():
    with pytest.raises(ProcessDied):
        await run_one(rollout_runner(InGroups(lambda n: [episode(1.0), ProcessDied("gone")])), 2)


async def test_a_rollout_group_has_one_key_and_separate_rollouts_one_each():
    assert rollout_runner(InGroups(lambda n: [])).schedule_keys(draw(3), 4) == [(3, 0)]
    assert rollout_runner(Words()).schedule_keys(draw(3), 4) == [(3, 0), (3, 1), (3, 2), (3, 3)]


# -- rewards


async def test_rewards_are_the_weighted_sum_and_each_part_is_kept():
    third = reward(lambda episodes: [0.1, 0.2, 0.3], weight=3.0)
    penalty = reward(lambda episodes: np.array([1, 0, 1]), weight=-0.5, name="penalty")
    group = await run_one(
        rollout_runner(Scripted(lambda member: episode(float(member))), score(2.0), third, penalty), 3
    )
    exact = (
        np.arange(3) * 2.0 + np.array([0.1, 0.2, 0.3], np.float32).astype(np.float64) * 3.0 - np.array([1, 0, 1]) / 2
    )
    assert group.rewards.tolist() == exact.astype(np.float32).tolist()
    assert {name: values.tolist() for name, values in group.parts.items()} == {
        "environment": [0, 1, 2],
        "other": np.array([0.1, 0.2, 0.3], np.float32).tolist(),
        "penalty": [1, 0, 1],
    }


async def test_a_reward_sees_only_the_episodes_that_ended():
    seen: list[int] = []

    def count(episodes: Sequence[Episode]) -> Any:
        seen.append(len(episodes))
        return np.ones(len(episodes))

    environment = Scripted(lambda member: Failed("x") if member == 1 else episode(1.0))
    group = await run_one(rollout_runner(environment, reward(count)), 3)
    assert seen == [2]
    assert len(group.rewards) == 2


async def test_no_reward_is_called_with_nothing():
    def never(episodes: Sequence[Episode]) -> Any:
        raise AssertionError("called")

    group = await run_one(rollout_runner(Scripted(lambda member: Failed("x", "rollout")), reward(never)), 2)
    assert group.failed == (Failed("x", "rollout"),) * 2


def _raises(episodes: Sequence[Episode]) -> Any:
    raise ZeroDivisionError("by nothing")


def _refuses(episodes: Sequence[Episode]) -> Any:
    raise DataError("no rows.", remedy="Add one.")


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (_raises, "DataError: reward 'other' raised ZeroDivisionError for task 'train-3': by nothing"),
        (_refuses, "DataError: reward 'other' raised DataError for task 'train-3': no rows. Add one."),
        (lambda episodes: [1.0], "DataError: reward 'other' gave shape (1,) for 2 episodes"),
        (lambda episodes: 1.0, "DataError: reward 'other' gave shape () for 2 episodes"),
        (lambda episodes: [1.0, float("nan")], "DataError: reward 'other' gave [1.0, nan] for task 'train-3'"),
        (lambda episodes: [1.0, 1e300], "DataError: reward 'other' gave [1.0, 1e+300] for task 'train-3'"),
        (lambda episodes: ["0.5", "1"], "DataError: reward 'other' gave ['0.5', '1'] for task 'train-3': not all numbers"),
        (lambda episodes: [10**400, 0], "DataError: reward 'other' gave"),
        (lambda episodes: [1.0, 3e38], "DataError: reward 'other' gave [1.0, 3e+38] for task 'train-3': not all finite and at most 1e+09"),
        (lambda episodes: ["good", "bad"], "DataError: reward 'other' gave ['good', 'bad'] for task 'train-3': not all numbers"),
        (lambda episodes: asyncio.sleep(9), "DeadlineExceeded: reward 'other' gave no answer within 0.3 s"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
async def test_a_reward_that_breaks_its_promise_fails_the_group_by_name(answer, wanted):
    group = await run_one(rollout_runner(Scripted(lambda member: episode(1.0)), score(), reward(answer)), 2)
    assert group.episodes == ()
    assert len(group.failed) == 2
    assert group.failed[0].cause.startswith(wanted)
    assert group.failed[0].where == "reward"


async def test_rewards_whose_weighted_sum_is_too_large_fail_the_group_by_name():
    weighted = WeightedReward("other", reward(lambda episodes: [1e9, 0.0]).reward, 8.0, 0.3)
    group = await run_one(rollout_runner(Scripted(lambda member: episode(1.0)), weighted), 2)
    assert [one.cause for one in group.failed] == [
        "DataError: the rewards of task 'train-3' times their weights make [8000000000.0, 0.0]"
    ] * 2


@pytest.mark.parametrize("wrong", [*VALUES, *EPISODES])
async def test_an_episode_that_must_not_be_trained_fails_alone_and_by_name(wrong: str):
    """The same table as at a server's routes."""
    change, named = (VALUES | EPISODES)[wrong]
    first, second = change(right_group()).episodes
    made = RolloutRunner(
        {"words": Scripted(lambda member: second if member else first)}, [score()], SayingEngine(), TOKENIZER,
        deadline_s=10, deterministic=False, vocabulary=WRONG_VOCABULARY,
    )  # fmt: skip
    group = await made.run(draw(3), made.schedule_keys(draw(3), 2), 2, Sampling())
    if wrong == "greedy tokens that are trained":  # an evaluation may be: the run's producer looks as well
        assert group.failed == ()
        group = checked_group(group)
        assert group.episodes == ()
    else:
        assert len(group.episodes) == 1
    assert re.search(named, group.failed[0].cause), group.failed[0].cause


async def test_rollouts_that_failed_are_still_named_when_a_reward_fails_as_well():
    environment = Scripted(lambda member: Failed("own", "tool") if member == 0 else episode(1.0))
    group = await run_one(rollout_runner(environment, reward(_raises)), 3)
    assert [one.where for one in group.failed] == ["tool", "reward", "reward"]


async def test_a_rewards_process_that_died_ends_the_run():
    def dies(episodes: Sequence[Episode]) -> Any:
        raise ProcessDied("reward-other was killed")

    with pytest.raises(ProcessDied, match="reward-other"):
        await run_one(rollout_runner(Scripted(lambda member: episode(1.0)), reward(dies)), 2)


# -- deterministic runs


async def test_a_deterministic_runner_asks_the_engine_in_draw_order_whatever_the_timing():
    class Slow(Words):
        async def rollout(self, task: Any, policy: Any, *, seed: int) -> Episode:
            await asyncio.sleep((seed % 7) / 300)
            return await super().rollout(task, policy, seed=seed)

    engine = SayingEngine()
    one = rollout_runner(Slow(), engine=engine, deterministic=True)
    draws = [draw(5), draw(2)]
    keys = [one.schedule_keys(each, 3) for each in draws]
    await asyncio.gather(*(one.run(each, at, 3, Sampling()) for each, at in zip(draws, keys, strict=True)))
    wanted = [derive(derive(1000 + number, member), 0) for number in (2, 5) for member in range(3)]
    assert [seeds[0] for _, _, seeds, _ in engine.requests] == wanted


@pytest.mark.parametrize("how", ["raises", "fails", "late"])
async def test_a_rollout_that_ends_without_sampling_does_not_hold_a_deterministic_round_up(how):
    class Uneven(Words):
        async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
            if seed == derive(1003, 0):
                if how == "raises":
                    raise KeyError("mine")
                if how == "late":
                    await asyncio.sleep(0.05)
                return Failed("own")
            return await super().rollout(task, policy, seed=seed)

    group = await asyncio.wait_for(run_one(rollout_runner(Uneven(), deterministic=True)), 60)
    assert (len(group.episodes), len(group.failed)) == (3, 1)


async def test_a_hosted_reward_that_hangs_once_fails_that_group_alone(tmp_path):
    """Through the runner, whose own deadline is the same: the stuck process is ended, and the next group is scored."""
    from atropos_core.config.run_file import Layer, load
    from atropos_core.launch.plan import make_plan
    from atropos_core.plugins.manager import load_plugins

    plugins = load_plugins([])
    settings = {
        "model": "toy",
        "environment": {"words": {"use": f"{Path(__file__).parents[1] / 'parts.py'}:Words"}},
        "reward": {
            "environment": {"use": "none"},
            "format": {"patterns": ["^(a+)+$"], "runs_in": "process", "deadline_s": 2.0},
        },
    }
    resolved = plugins.resolve_model("toy")
    plan = make_plan(load([Layer("preset", resolved.preset), Layer("test", settings)]).config, resolved, plugins)
    (tmp_path / "logs").mkdir()
    from atropos_core.launch.builder import build

    parts = await build(plan, tmp_path)
    try:
        [of] = parts.rewards
        task = Task("t", ())

        def message(text):
            return Episode((), 0.0, messages=({"role": "assistant", "content": text},))

        with pytest.raises(DeadlineExceeded):
            await of.reward(task, [message("a" * 40 + "b")])
        # Beside a stuck one, those that wait for their turn are scored all the same.
        many = [
            of.reward(task, [message("a" * 40 + "b")]),
            *(of.reward(task, [message("aaa"), message("b")]) for _ in range(8)),
        ]
        stuck, *scored = await asyncio.gather(
            *(within(one, of.deadline_s, "reward") for one in many), return_exceptions=True
        )
        assert isinstance(stuck, DeadlineExceeded)
        assert [one.tolist() for one in scored] == [[1.0, 0.0]] * 8
    finally:
        await parts.close()


async def test_metrics_that_rewards_report_are_the_rollouts_also_those_of_a_gold_reward():
    of = reward(lambda episodes: [Score(0.5, metrics={"canary/leak": 1.0}), *[0.0] * (len(episodes) - 1)])
    gold = reward(lambda episodes: [Score(1.0, metrics={"judge/sure": 0.9})] * len(episodes), name="gold")
    runner = rollout_runner(Words(), score(), of, replace(gold, gold=GoldTasks(1.0)))
    episodes = (episode(0.1), episode(0.2))
    scored = await runner.score(draw(1), Task("t", ()), episodes)
    assert [dict(one.metrics) for one in scored.episodes] == [
        {**episodes[0].metrics, "canary/leak": 1.0, "judge/sure": 0.9},
        {**episodes[1].metrics, "judge/sure": 0.9},
    ]


async def test_a_metric_that_two_rewards_report_fails_the_rollouts_with_its_name():
    def answer(episodes: Sequence[Episode]) -> Any:
        return [Score(1.0, metrics={"canary/leak": 1.0})] * len(episodes)

    runner = rollout_runner(Words(), reward(answer), reward(answer, name="again"))
    scored = await runner.score(draw(1), Task("t", ()), (episode(0.1),))
    assert not scored.episodes
    assert "'canary/leak', which the environment or another reward reports too" in scored.failed[0].cause
