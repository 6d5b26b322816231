"""Evaluation: which problems, what is averaged over what, and what is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.errors import DataError
from atropos_core.evaluation import evaluate, greedy
from atropos_core.interfaces import Environment
from atropos_core.rollouts import Player, WeightedReward
from atropos_core.seeds import derive
from atropos_core.types import Sampling
from tests.unit.parts import TOKENIZER, SayingEngine, Words, episode

GREEDY = Sampling(max_tokens=8, temperature=0)


class Marked(Words):
    """Problem n: score n; right where n is even; a metric where n < 2; as `fails` says, no episode at all."""

    def __init__(self, size: int = 4, *, fails: tuple[int, ...] = (), judged: bool = True) -> None:
        super().__init__(size)
        self._fails, self._judged = fails, judged
        self.splits: set[str] = set()

    def tasks(self, split: Any) -> Any:
        self.splits.add(split)
        return super().tasks(split)

    async def play(self, task: Any, policy: Any, *, seed: int) -> Any:
        n = task.data["n"]
        if n in self._fails:
            raise KeyError(f"lost {n}")
        await policy.sample(await policy.render(task.messages), seed=seed)
        metrics = {"steps": 10.0 + n} if n < 2 else {}
        return episode(float(n), "reply", correct=n % 2 == 0 if self._judged else None, metrics=metrics)


async def run(problems: int, *, seed: int = 0, engine: SayingEngine | None = None, **environments: Environment) -> Any:
    reward = WeightedReward("environment", EnvironmentReward(), 2.0, 10.0)
    player = Player(environments, [reward], engine or SayingEngine(), TOKENIZER, deadline_s=10, deterministic=False)
    return await evaluate(player, environments, problems, GREEDY, seed=seed)


async def test_the_first_problems_of_the_held_out_split_are_played_once_each():
    environment = Marked(9)
    evaluation = await run(3, only=environment)
    assert [group.task.id for group in evaluation.groups] == ["test-0", "test-1", "test-2"]
    assert [len(group.episodes) for group in evaluation.groups] == [1, 1, 1]
    assert environment.splits == {"test"}
    assert evaluation.tokens == 9, "three sampled tokens of each"


async def test_means_are_taken_over_what_there_is():
    evaluation = await run(4, only=Marked())
    assert evaluation.metrics == {
        "eval/accuracy": 0.5,
        "eval/reward": 2 * (0 + 1 + 2 + 3) / 4,
        "eval/steps": 10.5,
        "eval/problems": 4.0,
        "eval/failed": 0.0,
    }


async def test_a_rollout_that_failed_counts_as_wrong_and_gives_no_reward():
    metrics = (await run(4, only=Marked(fails=(0,)))).metrics
    assert metrics["eval/accuracy"] == 0.25, "only problem 2 of four"
    assert metrics["eval/reward"] == 2 * (1 + 2 + 3) / 3
    assert (metrics["eval/problems"], metrics["eval/failed"]) == (4, 1)


async def test_where_nothing_is_right_or_wrong_a_failure_makes_no_accuracy():
    metrics = (await run(4, only=Marked(fails=(3,), judged=False))).metrics
    assert "eval/accuracy" not in metrics
    assert metrics["eval/failed"] == 1


async def test_several_environments_share_the_problems_and_each_has_its_own_figures():
    evaluation = await run(4, first=Marked(), second=Marked(fails=(0,)))
    assert [(group.draw.environment, group.task.id) for group in evaluation.groups] == [
        ("first", "test-0"), ("first", "test-1"), ("second", "test-0"), ("second", "test-1"),
    ]  # fmt: skip
    metrics = evaluation.metrics
    assert metrics["eval/first/accuracy"] == 0.5
    assert metrics["eval/second/accuracy"] == 0.0
    assert metrics["eval/accuracy"] == 0.25
    assert metrics["eval/second/reward"] == 2.0


async def test_an_environment_with_fewer_problems_gives_all_it_has():
    evaluation = await run(100, small=Marked(2), large=Marked(5))
    assert [group.draw.environment for group in evaluation.groups] == ["small"] * 2 + ["large"] * 5


async def test_the_seed_of_a_problem_depends_on_its_place_and_not_on_its_neighbours():
    async def seeds(problems: int, **environments: Environment) -> dict[tuple[str, str], int]:
        groups = (await run(problems, seed=9, **environments)).groups
        return {(group.draw.environment, group.task.id): group.draw.seed for group in groups}

    alone, both = await seeds(3, b=Marked()), await seeds(6, a=Marked(), b=Marked())
    assert alone.items() <= both.items()
    assert alone["b", "test-1"] == derive(9, "evaluation", "b", 1)
    assert len(set(both.values())) == 6


async def test_nothing_to_evaluate_on_is_an_error_with_a_remedy():
    with pytest.raises(DataError, match="no environment has held-out tasks") as caught:
        await run(4, empty=Marked(0))
    assert "evaluation.problems=0" in str(caught.value)


async def test_an_evaluation_that_failed_everywhere_is_an_error_with_the_first_cause():
    with pytest.raises(
        DataError, match="all 2 evaluation rollouts failed; the first in play: KeyError: 'lost 0'"
    ) as caught:
        await run(2, only=Marked(fails=(0, 1)))
    assert "test_evaluation.py" in str(caught.value)


async def test_what_was_said_is_written_one_line_a_problem(tmp_path):
    evaluation = await run(2, only=Marked(fails=(1,)))
    path = tmp_path / "rollouts" / "eval.jsonl"
    evaluation.write(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [
        {
            "task": "test-0", "environment": "only", "correct": True, "reward": 0.0, "metrics": {"steps": 10.0},
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "reply"}],
        },
        {"task": "test-1", "environment": "only", "failed": "KeyError: 'lost 1'"},
    ]  # fmt: skip


def test_greedy_evaluation_drops_what_would_cut_the_distribution():
    sampling = Sampling(max_tokens=5, temperature=1.0, top_p=0.9, top_k=3)
    assert greedy(sampling, 0) == Sampling(max_tokens=5, temperature=0)
    assert greedy(sampling, 0.5) == Sampling(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3)
