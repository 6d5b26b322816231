"""The probe: exact distances of the toy table, and what it does with damage."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.builtin.config import ToyTrainerOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyTrainer
from atropos_core.plugins.provider import RunContext
from atropos_core.training.batch import to_batch
from atropos_core.training.probe import PROBE_TOKENS, WHOLE_TOKENS, Probe
from atropos_core.types import UNKNOWN_VERSION, Batch, Rollout
from tests.unit.parts import episode, group, rollout


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(ToyTrainerOptions(), RunContext(Path("."), TOY_MODEL))


def batch(*rollouts: Rollout) -> Batch:
    made = replace(group(0, [0.0]), episodes=(episode(0.0, "", *rollouts),))
    return to_batch([made.with_advantages(np.zeros(1, np.float32))], version=1)


async def test_an_unmoved_policy_has_a_shift_of_exactly_nothing(trainer):
    probe = await Probe.of(batch(rollout(2, 3), rollout(1, 4)), trainer)
    assert await probe.shift(trainer) == 0.0


async def test_the_shift_is_the_largest_change_of_a_sampled_tokens_logprob(trainer):
    probe = await Probe.of(batch(rollout(2, 3)), trainer)  # tokens 10 to 14, of which 12, 13, 14 were sampled
    table = trainer.weights["table"]
    size = len(table)
    table[12, 13] = 2.0  # from log(1/V) to 2 - log(V - 1 + e^2)
    expected = 2.0 - math.log(size - 1 + math.exp(2.0)) + math.log(size)
    assert await probe.shift(trainer) == pytest.approx(expected, abs=1e-6)
    table[13, 14] = -3.0
    expected = 3.0 + math.log(size - 1 + math.exp(-3.0)) - math.log(size)
    assert await probe.shift(trainer) == pytest.approx(expected, abs=1e-6), "falls count like rises"


async def test_tokens_that_were_only_given_do_not_count(trainer):
    probe = await Probe.of(batch(rollout(2, 3)), trainer)
    trainer.weights["table"][10, 11] = 5.0
    assert await probe.shift(trainer) == 0.0


async def test_short_replies_to_long_prompts_are_counted_with_their_prompts(trainer):
    def held(prompt, reply, count):
        return batch(*(rollout(prompt, reply, tokens=np.full(prompt + reply, 20, np.int32)) for _ in range(count)))

    for prompt, reply, count, kept in ((98, 2, 64, 10), (98, 2, 3, 3), (2 * WHOLE_TOKENS, 2, 2, 1)):
        probe = await Probe.of(held(prompt, reply, count), trainer)
        assert len(probe.state()["sequences"]) == kept


async def test_a_probe_holds_no_more_than_its_share_of_the_first_batch(trainer):
    rollouts = [rollout(1, 50, tokens=np.full(51, 20 + n, np.int32)) for n in range(6)]
    probe = await Probe.of(batch(*rollouts), trainer)
    state = probe.state()
    assert [len(at) for at in state["sampled"]] == [50, 50, 50, 50, 50, 6]
    assert sum(len(at) for at in state["sampled"]) == PROBE_TOKENS
    trainer.weights["table"][25, 25] = 1.0
    assert await probe.shift(trainer) > 0, "the sixth rollout has six tokens in it"
    alone = await Probe.of(batch(*(rollout(0, 128, tokens=np.full(128, 20, np.int32)) for _ in range(3))), trainer)
    assert len(alone.state()["sequences"]) == 2, "what is not looked at is not kept"


async def test_a_saved_probe_measures_the_same_to_the_last_bit(trainer):
    trainer.weights["table"][:] = np.random.default_rng(0).normal(size=trainer.weights["table"].shape)
    probe = await Probe.of(batch(rollout(2, 3), rollout(1, 4)), trainer)
    back = Probe.from_state(json.loads(json.dumps(probe.state())))
    assert await back.shift(trainer) == 0.0
    trainer.weights["table"][12, 13] += 0.1
    assert await back.shift(trainer) == await probe.shift(trainer) > 0
    assert back.state() == probe.state()


async def test_movement_between_versions_is_known_for_as_long_as_they_are_kept(trainer):
    probe = await Probe.of(batch(rollout(2, 3)), trainer)  # at version 0
    table = trainer.weights["table"]
    for version in (1, 2, 3):
        table[12, 13] += 1.0
        await probe.shift(trainer, version, keep=2)
    probe = Probe.from_state(json.loads(json.dumps(probe.state())))
    size = len(table)
    at = {n: n - math.log(size - 1 + math.exp(n)) for n in range(4)}
    assert probe.moved(3, 3) == 0.0
    assert probe.moved(2, 3) == pytest.approx(at[3] - at[2], abs=1e-5)
    assert probe.moved(1, 3) == pytest.approx(at[3] - at[1], abs=1e-5)
    assert probe.moved(0, 3) is None and probe.moved(3, 4) is None, "not kept"
    assert probe.moved(UNKNOWN_VERSION, 3) == pytest.approx(at[3] - at[0], abs=1e-5), "from the start at the most"


@pytest.mark.parametrize("damaged", [12, 32], ids=["first sequence", "second sequence"])
async def test_a_policy_that_gives_no_number_has_no_number_as_its_shift(trainer, damaged):
    second = rollout(0, 3, tokens=np.array([30, 32, 33], np.int32))
    probe = await Probe.of(batch(rollout(2, 3), second), trainer)
    trainer.weights["table"][damaged, 0] = np.nan
    assert math.isnan(await probe.shift(trainer))


async def test_a_batch_in_which_nothing_was_sampled_has_nothing_to_shift(trainer):
    given: Any = rollout(3, 0)
    probe = await Probe.of(batch(given), trainer)
    trainer.weights["table"][:] += np.arange(len(trainer.weights["table"]))
    assert await probe.shift(trainer) == 0.0
