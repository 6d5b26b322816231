"""Evaluation: which problems, what is averaged over what, and what is written."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb
from typing import Any

import pytest

from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.config.run_file import EvaluationSection, Layer, load
from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.evaluation import IN_FLIGHT, evaluate
from atropos_core.rollouts.evaluation_statistics import wilson
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.seeds import derive
from atropos_core.types import Sampling
from tests.unit.parts import TOKENIZER, SayingEngine, Words, episode

RUN = Sampling(max_tokens=8, temperature=0.7, top_p=0.9, top_k=3)


class Marked(Words):
    """Problem n: score n; right where n is even; a metric where n < 2; as `fails` says, no episode at all."""

    def __init__(self, size: int = 4, *, fails: tuple[int, ...] = (), judged: bool = True) -> None:
        super().__init__(size)
        self._fails, self._judged = fails, judged
        self.splits: set[str] = set()

    def tasks(self, split: Any) -> Any:
        self.splits.add(split)
        return super().tasks(split)

    async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
        n = task.data["n"]
        if n in self._fails:
            raise KeyError(f"lost {n}")
        await policy.sample(await policy.render(task.messages), seed=seed)
        metrics = {"steps": 10.0 + n} if n < 2 else {}
        return episode(float(n), "reply", correct=n % 2 == 0 if self._judged else None, metrics=metrics)


class Drawn(Words):
    """Problem n is right as often as its seeds say, by either of two graders, and half a time in none."""

    async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
        await policy.sample(await policy.render(task.messages), seed=seed)
        if task.data["n"] == 2 and seed % 3 == 0:
            raise KeyError("lost")
        metrics = {"accuracy_strict": float(seed % 4 == 0), "accuracy_half": 0.5}
        return episode(1.0, "reply", correct=seed % 2 == 0, metrics=metrics)


async def run(
    problems: int,
    *,
    seed: int = 0,
    engine: SayingEngine | None = None,
    section: Any = None,
    **environments: Environment,
) -> Any:
    reward = WeightedReward("environment", EnvironmentReward(), 2.0, 10.0)
    rollout_runner = RolloutRunner(
        environments, [reward], engine or SayingEngine(), TOKENIZER, deadline_s=10, deterministic=False
    )
    section = EvaluationSection(problems=problems, **(section or {}))
    return await evaluate(rollout_runner, environments, section, RUN, seed=seed)


async def test_the_first_problems_of_the_held_out_split_are_run_once_each():
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
        "eval/cut_off_lowest": 0.0,
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
        DataError, match="the first 2 evaluation rollouts all failed; the first in rollout: KeyError: 'lost 0'"
    ) as caught:
        await run(2, only=Marked(fails=(0, 1)))
    assert "test_evaluation.py" in caught.value.__notes__[0]


async def test_each_problem_is_run_with_seeds_of_its_own_and_the_evaluations_own_sampling():
    engine = SayingEngine()
    section = {"samples": 4, "temperature": 0.5, "top_p": 0.8, "max_tokens": 5}
    await run(2, engine=engine, section=section, only=Marked())
    assert {sampling for _, sampling, _, _ in engine.requests} == {Sampling(5, 0.5, 0.8, 0)}
    seeds = [seed for _, _, drawn, _ in engine.requests for seed in drawn]
    assert len(set(seeds)) == len(seeds) == 8
    again = SayingEngine()
    await run(1, engine=again, section=section | {"samples": 2}, only=Marked())
    assert [drawn for _, _, drawn, _ in again.requests] == [[seed] for seed in seeds[:2]]


async def test_pass_at_k_is_the_mean_over_problems_by_every_grader_and_failures_are_wrong():
    evaluation = await run(6, section={"samples": 8, "pass_at": (1, 4, 8), "temperature": 1.0}, only=Drawn())
    counts = [
        (
            sum(one.correct for one in group.episodes),
            sum(one.metrics["accuracy_strict"] == 1 for one in group.episodes),
        )
        for group in evaluation.groups
    ]
    assert len({right for right, _ in counts}) > 2, "problems of several difficulties"
    assert evaluation.metrics["eval/failed"] > 0
    for k in (1, 4, 8):
        for place, ending in enumerate(("", "_strict")):
            exact = [1 - Fraction(comb(8 - count[place], k), comb(8, k)) for count in counts]
            assert evaluation.metrics[f"eval/pass@{k}{ending}"] == pytest.approx(float(sum(exact) / 6), abs=1e-12)
    assert evaluation.metrics["eval/accuracy"] == pytest.approx(evaluation.metrics["eval/pass@1"])
    assert evaluation.metrics["eval/accuracy_strict"] == pytest.approx(evaluation.metrics["eval/pass@1_strict"])
    assert evaluation.metrics["eval/accuracy_half"] == 0.5, "which is no verdict"
    assert "eval/accuracy_half" not in evaluation.shares
    share = evaluation.shares["eval/pass@4"]
    assert (share.low, share.high) == wilson(evaluation.metrics["eval/pass@4"], 6)


class Crowded(SayingEngine):
    """Counts how many ask at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.most = 0

    async def sample(self, *arguments: Any) -> Any:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            return await super().sample(*arguments)
        finally:
            self.inside -= 1


async def test_more_rollouts_than_go_at_once_are_run_one_part_after_another():
    engine, problems = Crowded(), IN_FLIGHT // 2 + 10
    evaluation = await run(problems, engine=engine, section={"samples": 2, "temperature": 1.0}, only=Marked(2000))
    assert engine.most == IN_FLIGHT
    assert [group.task.id for group in evaluation.groups] == [f"test-{n}" for n in range(problems)]


async def test_replies_are_written_one_line_a_problem(tmp_path):
    evaluation = await run(2, section={"samples": 2, "temperature": 1.0}, only=Marked(fails=(1,)))
    path = tmp_path / "rollouts" / "eval.jsonl"
    evaluation.write(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    message = {
        "correct": True, "reward": 0.0, "metrics": {"steps": 10.0}, "finish": "stop", "tokens": 3,
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "reply"}],
    }  # fmt: skip
    lost = {"failed": "KeyError: 'lost 1'", "where": "rollout"}
    assert rows == [
        {"task": "test-0", "environment": "only", "correct": 2, "total": 2, "samples": [message, message]},
        {"task": "test-1", "environment": "only", "correct": 0, "total": 2, "samples": [lost, lost]},
    ]


def test_greedy_evaluation_drops_what_would_cut_the_distribution():
    assert EvaluationSection().sampling(RUN) == Sampling(max_tokens=8, temperature=0)
    assert EvaluationSection(temperature=0.5).sampling(RUN) == Sampling(max_tokens=8, temperature=0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"samples": 4}, "evaluation.samples = 4 at evaluation.temperature = 0 would be one reply 4 times"),
        (
            {"samples": 4, "temperature": 1.0, "pass_at": [1, 8]},
            "pass@8 cannot be estimated from evaluation.samples = 4",
        ),
        ({"pass_at": [0]}, "pass@0 cannot be estimated"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        load([Layer("run.toml", {"evaluation": values})])
