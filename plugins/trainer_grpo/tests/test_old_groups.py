"""Groups that came over the old Atropos protocol train like any other: with logprobs, without, with advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import DataError
from atropos_core.training.batch import to_batch

wire = pytest.importorskip(
    "atropos_trajectory_api.legacy_groups.incoming_groups", reason="the trajectory API is not installed"
)

PROMPT, GOOD, BAD = [3, 4, 5], 9, 10


def group(**fields):
    """A reply that is rewarded and one that is not, as an old client sends them."""
    sent = {
        "tokens": [[*PROMPT, GOOD], [*PROMPT, BAD]],
        "masks": [[-100, -100, -100, GOOD], [-100, -100, -100, BAD]],
        "scores": [1, 0],
        "env_id": 0,
    }
    return wire.from_wire(wire.parse(wire.dumps(sent | fields)), environment="old", version=None)


def batch_of(*groups):
    """Make the batch as it reaches a trainer in a separate process."""
    ready = [one.with_advantages(np.array([1, -1], np.float32)) for one in groups]
    return decode(encode_bytes(to_batch([decode(encode_bytes(one)) for one in ready], version=1)))


async def logprobs(trainer):
    return [
        float(row[-1]) for row in await trainer.logprobs([np.array([*PROMPT, last], np.int32) for last in (GOOD, BAD)])
    ]


@pytest.mark.parametrize("given", ["logprobs", "none", "advantages", "both"])
async def test_the_rewarded_reply_becomes_likelier(open_trainer, gate, given):
    trainer = await open_trainer(learning_rate=1e-3)
    before = await logprobs(trainer)
    fields = {
        "logprobs": {"inference_logprobs": [[1.0, 1.0, 1.0, before[0]], [1.0, 1.0, 1.0, before[1]]]},
        "advantages": {"advantages": [[0, 0, 0, 2.0], [0, 0, 0, -2.0]], "scores": [0, 0]},
    }
    groups = {"none": [{}], "both": list(fields.values())}.get(given) or [fields[given]]
    for _ in range(5):
        metrics = await trainer.step(batch_of(*(group(**one) for one in groups)), gate)
        assert np.isfinite(metrics["loss"])
    after = await logprobs(trainer)
    assert after[0] > before[0] + 0.02
    assert after[1] < before[1] - 0.02


async def test_a_sequence_whose_advantage_is_set_to_zero_moves_nothing(open_trainer, gate):
    trainer = await open_trainer()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    zeroed = {"set_advantage_to_zero": True}
    batch = batch_of(group(overrides=[zeroed, zeroed]))
    assert batch.trained.sum() == 2
    await trainer.step(batch, gate)
    assert all(torch.equal(one, other) for one, other in zip(trainer.model.parameters(), before, strict=True))


async def test_without_logprobs_a_trainer_may_refuse(open_trainer, gate):
    trainer = await open_trainer(missing_logprobs="refuse")
    with pytest.raises(DataError, match="came without logprobs"):
        await trainer.step(batch_of(group()), gate)


async def test_supervised_sequences_are_refused_and_get_no_other_loss(open_trainer, gate):
    trainer = await open_trainer()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(DataError, match=r"1 of 2 sequences are marked as supervised data \(sft\)"):
        await trainer.step(batch_of(group(overrides=[{}, {"sft": True}])), gate)
    assert all(torch.equal(one, other) for one, other in zip(trainer.model.parameters(), before, strict=True))


async def test_what_only_some_clients_send_reaches_the_trainer():
    more = group(
        ref_logprobs=[[0, 0, 0, -1.0], [0, 0, 0, -2.0]],
        distill_token_ids=[[[], [], [], [9, 1]], [[], [], [], [10]]],
        distill_logprobs=[[[], [], [], [-0.5, -1.0]], [[], [], [], [-0.25]]],
        overrides=[{"sft": True}, {"temperature": 0.5}],
    )
    batch = batch_of(group(), more)
    assert batch.columns["ref_logprobs"].values.tolist() == [0] * 8 + [0, 0, 0, -1, 0, 0, 0, -2]
    assert batch.columns["sft"].values.tolist() == [False, False, True, False]
    assert batch.temperature.tolist() == [1, 1, 1, 0.5]
    picked = batch.select([3, 2])
    assert picked.ragged["teacher_token_ids"].values.tolist() == [10, 9, 1]
    assert picked.ragged["teacher_logprobs"].offsets.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 3]
