"""One minibatch's gradient: what must not change it, and what it is measured by."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atropos_core.errors import ConfigError, DataError
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.update import Update

LOSSES = [{"loss": "grpo"}, {"loss": "dr_grpo", "loss_length": 20}, {"loss": "dapo"}]


@pytest.fixture
def gradient(model_of):
    """`gradient(batch, **options)`: the loss and the flat gradient of one minibatch."""

    def compute(batch, **options):
        options = GrpoOptions(**options)
        model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True)
        update = Update(model, Optimizer(model.parameters(), options), options, batch, "cpu", 0)
        (chosen,) = update.minibatches()
        update.backward(chosen)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return update._losses[0], torch.cat([part.flatten() for part in flat])

    return compute


def same(one, other):
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    torch.testing.assert_close(one[1], other[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
@pytest.mark.parametrize(
    "other",
    [{"tokens_per_microbatch": 60}, {"tokens_per_microbatch": 1}, {"share_prompts": False}, {"logprob_chunk": 5}],
    ids=str,
)
def test_options_that_save_memory_change_no_gradient(gradient, make_batch, loss, other):
    batch = make_batch()
    same(gradient(batch, **loss), gradient(batch, **loss, **other))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_the_order_of_sequences_changes_no_gradient(gradient, make_batch, loss):
    batch = make_batch()
    shuffled = batch.select(np.random.default_rng(1).permutation(batch.sequences))
    same(gradient(batch, **loss), gradient(shuffled, **loss))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_two_ranks_that_each_take_half_the_sequences_add_up_to_one(gradient, make_batch, loss):
    batch = make_batch(groups=2)
    halves = [batch.select(np.arange(4)), batch.select(np.arange(4, 8))]
    share = [1.0, 1.0]
    if loss["loss"] == "dapo":
        share = [half.trained.sum() / batch.trained.sum() * 2 for half in halves]
    parts = [gradient(half, **loss) for half in halves]
    whole = tuple(sum(weight * part[axis] / 2 for weight, part in zip(share, parts, strict=True)) for axis in (0, 1))
    same(gradient(batch, **loss), whole)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss["loss"])
def test_a_sequence_that_is_wholly_masked_changes_no_gradient(gradient, make_batch, loss):
    batch = make_batch()
    masked = replace(batch, trained=batch.trained.copy(), advantages=batch.advantages.copy())
    last = slice(batch.offsets[-2], batch.offsets[-1])
    masked.trained[last] = False
    masked.advantages[last] = 0
    same(gradient(batch.select(np.arange(batch.sequences - 1)), **loss), gradient(masked, **loss))


def test_zero_advantages_have_zero_gradient(gradient, make_batch):
    batch = make_batch()
    loss, flat = gradient(replace(batch, advantages=np.zeros_like(batch.advantages)))
    assert loss == 0.0
    assert not flat.any()


def test_sequences_without_advantage_are_measured_but_not_differentiated(gradient, make_batch):
    batch = make_batch()
    flat_group = replace(batch, advantages=np.where(np.repeat(batch.group == 0, batch.lengths), 0, batch.advantages))
    same(gradient(flat_group, tokens_per_microbatch=10**6), gradient(flat_group, tokens_per_microbatch=1))


def test_a_token_at_the_very_beginning_of_a_sequence_is_not_trained(gradient, make_batch):
    batch = make_batch()
    wrong = replace(batch, trained=batch.trained.copy(), advantages=batch.advantages.copy())
    wrong.trained[batch.offsets[:-1]] = True
    wrong.advantages[batch.offsets[:-1]] = 9.0
    same(gradient(batch), gradient(wrong))


async def on_policy(trainer, batch, temperature=1.0):
    """The batch as an engine with the trainer's own weights would have sampled it."""
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    logprobs = np.concatenate(await trainer.logprobs(list(sequences), temperature))
    return replace(
        batch,
        logprobs=np.where(batch.sampled, logprobs, 0).astype(np.float32),
        temperature=np.full(batch.sequences, temperature, np.float32),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_on_policy_logprobs_give_ratio_one_and_alignment_zero(open_trainer, make_batch, gate, temperature):
    trainer = await open_trainer()
    metrics = await trainer.step(await on_policy(trainer, make_batch(), temperature), gate)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip/fraction"] == 0.0
    assert metrics["alignment/max_abs_logprob_diff"] < 1e-5
    assert metrics["kl/rollout_k3"] == pytest.approx(0.0, abs=1e-5)


async def test_alignment_sees_a_single_wrong_logprob_and_only_fresh_tokens(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    batch = await on_policy(trainer, make_batch())
    places = np.flatnonzero(batch.sampled)
    logprobs, version = batch.logprobs.copy(), batch.policy_version.copy()
    logprobs[places[3]] += 0.25
    logprobs[places[5]] += 0.5
    version[places[5]] = batch.version - 2  # sampled one policy earlier: may differ
    metrics = await trainer.step(replace(batch, logprobs=logprobs, policy_version=version), gate)
    assert metrics["alignment/max_abs_logprob_diff"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["alignment/fresh_tokens"] == len(places) - 1
    assert metrics["alignment/mean_abs_logprob_diff"] == pytest.approx(0.25 / (len(places) - 1), abs=1e-5)


async def test_entropy_is_that_of_the_policy(open_trainer, make_batch, gate):
    trainer = await open_trainer()
    batch = make_batch()
    total, count = 0.0, 0
    for tokens, trained in zip(
        np.split(batch.tokens, batch.offsets[1:-1]), np.split(batch.trained, batch.offsets[1:-1]), strict=True
    ):
        candidates = [np.append(tokens[:t], v).astype(np.int32) for t in np.flatnonzero(trained)[:1] for v in range(37)]
        logs = np.array([values[-1] for values in await trainer.logprobs(candidates)], dtype=np.float64)
        total, count = total - float((np.exp(logs) * logs).sum()), count + 1
    first_only = replace(batch, trained=batch.trained.copy(), sampled=batch.sampled.copy())
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        first = begin + np.flatnonzero(batch.trained[begin:end])[0]
        first_only.trained[first + 1 : end] = False
    metrics = await trainer.step(first_only, gate)
    assert metrics["entropy"] == pytest.approx(total / count, abs=1e-4)


async def test_truncated_sampling_is_refused_against_rollout_logprobs_and_trained_when_recomputed(
    open_trainer, make_batch, gate
):
    batch = replace(make_batch(), truncated=np.ones(12, np.bool_))
    with pytest.raises(ConfigError, match="renormalised"):
        await (await open_trainer()).step(batch, gate)
    assert gate.entered == 0
    metrics = await (await open_trainer(old_logprobs="recompute")).step(batch, gate)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["alignment/fresh_tokens"] == 0


async def test_missing_logprobs_are_recomputed_or_refused(open_trainer, make_batch, gate):
    batch = make_batch()
    batch = replace(batch, has_logprobs=np.zeros(12, np.bool_), logprobs=np.zeros_like(batch.logprobs))
    metrics = await (await open_trainer()).step(batch, gate)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(DataError, match="without logprobs"):
        await (await open_trainer(missing_logprobs="refuse")).step(batch, gate)


async def test_recomputed_logprobs_are_those_before_the_first_of_several_updates(open_trainer, make_batch, gate):
    batch = make_batch()
    given = await open_trainer(epochs=3)
    missing = await open_trainer(epochs=3)
    seen = await given.step(await on_policy(given, batch), gate)
    recomputed = await missing.step(replace(batch, has_logprobs=np.zeros(12, np.bool_)), gate)
    assert abs(seen["ratio/mean"] - 1) > 1e-4  # the policy did move away
    for name in ("loss", "ratio/mean", "clip/fraction", "grad_norm"):
        assert recomputed[name] == pytest.approx(seen[name], abs=1e-4)


async def test_an_empty_batch_and_a_nan_advantage_are_refused_before_anything_is_written(
    open_trainer, make_batch, gate
):
    trainer = await open_trainer()
    batch = make_batch()
    with pytest.raises(DataError, match="at least one token"):
        await trainer.step(batch.select([]), gate)
    with pytest.raises(DataError, match="not a finite number"):
        await trainer.step(replace(batch, advantages=np.full_like(batch.advantages, np.nan)), gate)
    assert gate.entered == 0
