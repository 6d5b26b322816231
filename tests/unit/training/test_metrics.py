"""How far trainer and engine are apart over a step's groups, with the toy trainer: all its tokens are equally likely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atropos_core.builtin.config import ToyTrainerOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyTrainer
from atropos_core.plugins.provider import RunContext
from atropos_core.training.alignment_check import rescoring_difference
from atropos_core.training.metrics import group_metrics
from atropos_core.types import Rollout, ScoredGroup
from tests.unit.parts import TOKENIZER, episode, group, rollout

UNIFORM = -float(np.log(TOKENIZER.vocabulary))


@pytest.fixture
def trainer(tmp_path: Path) -> ToyTrainer:
    return ToyTrainer(ToyTrainerOptions(), RunContext(directory=tmp_path, model=TOY_MODEL, steps=1, seed=0))


def of(*rollouts: Rollout) -> list[ScoredGroup]:
    """A group of one episode a rollout."""
    made = group(0, (0.0,) * len(rollouts))
    return [ScoredGroup(made.draw, made.task, tuple(episode(0.0, "", one) for one in rollouts), made.rewards)]


async def test_the_largest_difference_is_over_sampled_tokens_of_all_rollouts(trainer):
    groups = of(rollout(logprob=UNIFORM), rollout(logprob=UNIFORM + 0.25), rollout(logprob=UNIFORM - 0.125))
    assert await rescoring_difference(groups, trainer) == pytest.approx(0.25, abs=1e-6)
    cool = rollout(logprob=UNIFORM + 1, temperature=0.5)
    assert await rescoring_difference([*groups, *of(cool)], trainer) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "finishes", "correct", "share"),
    [
        ((0, 0, 0, 0), "lllb", None, 0.75),  # nothing is rewarded
        ((0, 0, 1, 0), "llbl", None, 0.75),
        ((0, 0.05, 1, 0), "llbl", None, 0.75),
        ((1, 1, 1, 1), "llll", True, 0.0),  # all solved
        ((0.2, 0.9, 0.5, 0.7), "llll", None, 0.25),  # of a length that all have
    ],
)
def test_replies_that_were_cut_off_and_earned_least_are_counted(rewards, finishes, correct, share):
    made = group(0, rewards)
    ends = {"l": "length", "b": "stop"}
    episodes = [
        replace(one, finish=ends[how], correct=correct) for one, how in zip(made.episodes, finishes, strict=True)
    ]
    metrics = group_metrics([replace(made, episodes=tuple(episodes))])
    assert metrics["rollouts/cut_off_lowest"] == share
    assert metrics["rollouts/cut_off"] == finishes.count("l") / 4


async def test_what_cannot_be_compared_is_left_out(trainer):
    assert await rescoring_difference([], trainer) is None
    assert await rescoring_difference(of(rollout(logprobs=None), rollout(logprob=9.0, truncated=True)), trainer) is None


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_logprob_that_is_no_number_is_the_largest_difference_wherever_it_stands(trainer, place):
    tokens = np.arange(20, 25, dtype=np.int32)
    trainer.weights["table"][tokens[2]] = np.nan  # what follows this token
    rollouts = [rollout(logprob=UNIFORM + 0.1) for _ in range(3)]
    rollouts[place] = rollout(logprob=UNIFORM, tokens=tokens)
    assert np.isnan(await rescoring_difference(of(*rollouts), trainer))


def test_a_metric_with_a_section_is_the_steps_as_well_over_the_episodes_that_have_it():
    [made] = of(rollout(), rollout(), rollout())
    with_metrics = [{"agent/calls": 2.0, "plain": 9.0}, {"agent/calls": 4.0}, {}]
    episodes = tuple(replace(one, metrics=of) for one, of in zip(made.episodes, with_metrics, strict=True))
    metrics = group_metrics([replace(made, episodes=episodes)])
    assert metrics["agent/calls"] == 3.0
    assert "plain" not in metrics
