"""One minibatch's gradient: what must not change it, and what it is measured by."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from atropos_core.errors import AtroposError, DataError
from atropos_core.health.alignment import EVIDENCE_NATS, MOVED, moved_column
from atropos_core.types import Column

LOSSES = [
    {"loss": "grpo"},
    {"loss": "dr_grpo", "loss_length": 20},
    {"loss": "dapo", "dual_clip": 3.0},
    {
        "loss": "gspo",
        "clip_low": 0.9,
        "clip_high": 5.0,
    },  # its own bounds would let next to nothing of these batches move
    {"loss": "cispo"},
    {"loss": "reinforce"},
    {"loss": "sapo"},
    {"loss": "vespo", "vespo": {"lambda_pos": 0.2, "k_pos": 0.3, "k_neg": 0.2}},  # as wide as these batches need it
    {"loss": "luspo", "clip_low": 0.9, "clip_high": 5.0},
    {"loss": "kpop", "kpop": {"threshold": 0.5}},
    {"loss": "gmpo", "clip_low": 0.9, "clip_high": 5.0},
    {"loss": "dppo"},
    {"loss": "grpo", "average": "sum", "entropy_coefficient": 0.1},
    {"loss": "dapo", "kl": {"coefficient": 0.1, "estimator": "k3"}},
    {"loss": "reinforce", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}},
    {"loss": "grpo", "old_logprobs": "recompute", "correction": {"kind": "tis"}},
    {"loss": "grpo", "old_logprobs": "recompute", "correction": {"kind": "sequence_mis", "high": 1e9}},
]


NAMED = lambda loss: "-".join([loss["loss"], *[name for name in loss if name not in ("loss", "loss_length")]])  # noqa: E731


def same(one, other):
    assert one[0] == pytest.approx(other[0], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(one[1], other[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMED)
@pytest.mark.parametrize(
    "other",
    [{"tokens_per_microbatch": 60}, {"tokens_per_microbatch": 1}, {"share_prompts": False}, {"logprob_chunk": 5}],
    ids=str,
)
def test_options_that_save_memory_change_no_gradient(gradient, make_batch, loss, other):
    batch = make_batch()
    same(gradient(batch, **loss), gradient(batch, **loss, **other))


@pytest.mark.parametrize("loss", LOSSES, ids=NAMED)
def test_the_order_of_sequences_changes_no_gradient(gradient, make_batch, loss):
    batch = make_batch()
    shuffled = batch.select(np.random.default_rng(1).permutation(batch.sequences))
    same(gradient(batch, **loss), gradient(shuffled, **loss))


@pytest.mark.parametrize("loss", LOSSES, ids=NAMED)
def test_two_ranks_that_each_take_half_the_sequences_add_up_to_one(gradient, make_batch, loss):
    batch = make_batch(groups=2)
    halves = [batch.select(np.arange(4)), batch.select(np.arange(4, 8))]
    share = [1.0, 1.0]
    if loss["loss"] in ("dapo", "cispo", "vespo", "kpop", "dppo"):  # their averages are over all tokens
        share = [half.trained.sum() / batch.trained.sum() * 2 for half in halves]
    parts = [gradient(half, **loss) for half in halves]
    whole = tuple(sum(weight * part[axis] / 2 for weight, part in zip(share, parts, strict=True)) for axis in (0, 1))
    same(gradient(batch, **loss), whole)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMED)
def test_a_sequence_that_is_wholly_masked_changes_no_gradient(gradient, make_batch, loss):
    batch = make_batch()
    masked = replace(batch, trained=batch.trained.copy(), advantages=batch.advantages.copy())
    last = slice(batch.offsets[-2], batch.offsets[-1])
    masked.trained[last] = False
    masked.advantages[last] = 0
    same(gradient(batch.select(np.arange(batch.sequences - 1)), **loss), gradient(masked, **loss))


def test_whitening_is_over_the_whole_batch_and_not_over_a_micro_batch(gradient, make_batch):
    batch = make_batch()
    trained = batch.trained & ~np.isin(np.arange(len(batch.tokens)), batch.offsets[:-1])
    values = batch.advantages[trained].astype(np.float64)
    by_hand = batch.advantages.copy()
    by_hand[trained] = (values - values.mean()) / values.std(ddof=1)
    expected = gradient(replace(batch, advantages=by_hand))
    same(expected, gradient(batch, whiten_advantages=True))
    same(expected, gradient(batch, whiten_advantages=True, tokens_per_microbatch=1))


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
    positions = np.flatnonzero(batch.sampled)
    logprobs, version = batch.logprobs.copy(), batch.policy_version.copy()
    logprobs[positions[3]] += 0.25
    logprobs[positions[5]] += 0.5
    version[positions[5]] = batch.version - 2  # sampled one policy earlier: may differ
    metrics = await trainer.step(replace(batch, logprobs=logprobs, policy_version=version), gate)
    assert metrics["alignment/max_abs_logprob_diff"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["alignment/fresh_tokens"] == len(positions) - 1
    assert metrics["alignment/mean_abs_logprob_diff"] == pytest.approx(0.25 / (len(positions) - 1), abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old_logprobs": "recompute"},
        {"epochs": 2},
        {"minibatches": 3},
        {"old_logprobs": "recompute", "minibatches": 3, "epochs": 2},
        {"tokens_per_microbatch": 30, "minibatches": 2},
    ],
    ids=str,
)
async def test_every_token_that_claims_a_logprob_is_compared_by_passes_that_are_made_anyway(
    open_trainer, make_batch, gate, options
):
    trainer = await open_trainer(**options)
    batch = await on_policy(trainer, make_batch())
    silent = np.arange(batch.sequences) == 4
    batch = replace(batch, has_logprobs=~silent, logprobs=np.where(np.repeat(silent, batch.lengths), 0, batch.logprobs))
    metrics = await trainer.step(batch, gate)
    left = (batch.sampled & np.repeat(silent, batch.lengths)).sum() / batch.sampled.sum()
    assert metrics["alignment/unchecked_share"] == pytest.approx(left)
    assert metrics["alignment/without_logprobs"] == 1
    assert metrics["alignment/max_abs_logprob_diff"] < 1e-5
    assert metrics.get("alignment/impossible_nats", 0.0) < EVIDENCE_NATS / 10


@pytest.mark.parametrize("claimed", [-30.0, -0.01], ids=["too low", "too high"])
@pytest.mark.parametrize("version", [0, -1, 1], ids=["an older version", "an unknown one", "the newest"])
@pytest.mark.parametrize("options", [{}, {"old_logprobs": "recompute", "minibatches": 2}], ids=str)
async def test_made_up_tokens_and_logprobs_are_found_whatever_version_they_claim(
    open_trainer, make_batch, gate, options, version, claimed
):
    trainer = await open_trainer(**options)
    batch = await on_policy(trainer, make_batch(version=2))
    forged_one = int(np.add.reduceat(batch.sampled.astype(int), batch.offsets[:-1]).argmax())
    rows = np.repeat(np.arange(batch.sequences) == forged_one, batch.lengths) & batch.sampled
    forged = replace(
        batch,
        logprobs=np.where(rows, np.float32(claimed), batch.logprobs),
        policy_version=np.where(rows, version, 1).astype(np.int32),
        columns={MOVED: moved_column([0.01] * batch.sequences)},
    )
    metrics = await trainer.step(forged, gate)
    if version == 1:
        assert metrics["alignment/max_abs_logprob_diff"] > 1 and metrics["alignment/worst_fresh"] == forged_one
    else:
        assert metrics["alignment/impossible_nats"] > EVIDENCE_NATS and metrics["alignment/worst_stale"] == forged_one


async def test_of_later_minibatches_a_sample_is_compared_before_any_step(open_trainer, make_batch, gate):
    trainer = await open_trainer(minibatches=3, learning_rate=0.05)
    batch = await on_policy(trainer, make_batch(groups=6))
    metrics = await trainer.step(batch, gate)
    first = batch.sampled.sum() / 3
    assert first < metrics["alignment/fresh_tokens"] < batch.sampled.sum() / 2, "those of the first and a sixteenth"
    assert metrics["alignment/max_abs_logprob_diff"] < 1e-5
    assert metrics["alignment/stale_mean_abs_logprob_diff"] > 1e-4, "the others are of weights that moved"


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


def with_reference(batch, seed=0):
    """As an environment sends it that computes reference logprobs itself."""
    values = np.random.default_rng(seed).normal(-3, 0.3, len(batch.tokens)).astype(np.float32)
    return replace(batch, columns={"ref_logprobs": Column("token", values, np.ones(len(values), np.bool_))}), values


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
async def test_the_kl_term_is_the_weighted_sum_of_its_estimator(open_trainer, make_batch, gate, estimator):
    trainer = await open_trainer(loss="dapo", learning_rate=0.0)
    batch, reference = with_reference(await on_policy(trainer, make_batch()))
    without = await trainer.step(batch, gate)
    kl = {"coefficient": 0.3, "estimator": estimator}
    withal = await (await open_trainer(loss="dapo", learning_rate=0.0, kl=kl)).step(batch, gate)
    d = (batch.logprobs - reference)[batch.trained].astype(np.float64)
    mean = (d**2 / 2 if estimator == "k2" else np.exp(-d) + d - 1).mean()  # the ratio is 1
    assert withal["loss"] - without["loss"] == pytest.approx(0.3 * mean, rel=1e-6)
    assert withal["kl/reference_k3"] == pytest.approx((np.exp(-d) + d - 1).mean(), rel=1e-6)
    assert "kl/reference_k3" not in without


async def test_a_penalised_reward_takes_k1_from_what_leads_to_it(open_trainer, make_batch, gate):
    trainer = await open_trainer(loss="reinforce", average="token", learning_rate=0.0)
    batch, reference = with_reference(await on_policy(trainer, make_batch()))
    advantages = batch.advantages.astype(np.float64).copy()
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        positions = [t for t in range(begin, end) if batch.trained[t]]
        for t in positions:
            advantages[t] -= 0.2 * sum(float(batch.logprobs[s] - reference[s]) for s in positions if s >= t)
    expected = await trainer.step(replace(batch, advantages=advantages.astype(np.float32)), gate)
    kl = {"coefficient": 0.2, "estimator": "k1", "place": "reward"}
    other = await open_trainer(loss="reinforce", average="token", learning_rate=0.0, kl=kl)
    metrics = await other.step(batch, gate)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["frozen copy", "base under LoRA"])
async def test_the_reference_is_the_model_that_the_run_began_with(open_trainer, make_batch, gate, lora):
    trainer = await open_trainer(kl={"coefficient": 0.01}, learning_rate=0.02, lora=lora)
    batch = await on_policy(trainer, make_batch())
    before = batch.logprobs
    first = await trainer.step(batch, gate)
    assert first["kl/reference_k3"] == pytest.approx(0.0, abs=1e-6)
    moved = await on_policy(trainer, batch)
    metrics = await trainer.step(moved, gate)
    d = (moved.logprobs - before)[batch.trained].astype(np.float64)
    assert metrics["kl/reference_k3"] == pytest.approx((np.exp(-d) + d - 1).mean(), rel=1e-3)
    assert metrics["kl/reference_k3"] > 1e-4, "the policy did move away"


async def test_the_entropy_bonus_is_the_weighted_entropy(open_trainer, make_batch, gate):
    plain = await open_trainer(loss="dapo", learning_rate=0.0)
    bonus = await open_trainer(loss="dapo", learning_rate=0.0, entropy_coefficient=0.5)
    batch = make_batch()
    without, withal = await plain.step(batch, gate), await bonus.step(batch, gate)
    assert without["loss"] - withal["loss"] == pytest.approx(0.5 * without["entropy"], rel=1e-5)


async def test_corrections_weigh_the_trainers_own_logprobs_against_the_engines(open_trainer, make_batch, gate):
    options = {"loss": "dapo", "learning_rate": 0.0, "old_logprobs": "recompute"}
    trainer = await open_trainer(**options)
    batch = await on_policy(trainer, make_batch())
    shift = np.random.default_rng(2).normal(0, 0.6, len(batch.tokens)).astype(np.float32)
    shifted = replace(batch, logprobs=np.where(batch.sampled, batch.logprobs - shift, 0).astype(np.float32))
    metrics = await (await open_trainer(**options, correction={"kind": "tis"})).step(shifted, gate)
    rho = np.exp(shift[batch.trained].astype(np.float64))
    weights, advantages = np.minimum(rho, 2.0), batch.advantages[batch.trained]
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6), "against its own logprobs"
    assert metrics["correction/mean"] == pytest.approx(weights.mean(), rel=1e-4)
    assert metrics["correction/fraction"] == pytest.approx((rho > 2).mean(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(-(weights * advantages).mean(), rel=1e-4)


async def test_a_loss_of_ones_own_is_named_by_its_file(open_trainer, make_batch, gate, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from atropos_trainer_grpo.losses import Surrogate, register\n\n@register(average='sequence')\n"
        "def mine(rows, clip):\n    ratio = rows.ratio()\n"
        "    return Surrogate(-ratio * rows.advantages, ratio.detach())\n\nwrong = 1\n"
    )
    mine = await open_trainer(loss=f"{tmp_path}/mine.py:mine")
    batch = await on_policy(mine, make_batch())  # ratios of 1, so that nothing is clipped
    expected = await (await open_trainer()).step(batch, gate)
    metrics = await mine.step(batch, gate)
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, why in (("gprpo", "Did you mean 'grpo'"), (f"{tmp_path}/mine.py:wrong", "is not a loss")):
        with pytest.raises(AtroposError, match=why):
            await open_trainer(loss=name)
