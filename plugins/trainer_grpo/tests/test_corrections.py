"""Importance weights against plain float64 loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_trainer_grpo.config import BOUNDS, GrpoOptions
from atropos_trainer_grpo.corrections import importance_weights
from atropos_trainer_grpo.losses import Rows


def oracle(kind, old, rollout, known, lengths, low, high):
    weights, begin = [], 0
    for length in lengths:
        part = range(begin, begin + length)
        logs = [old[t] - rollout[t] if known[t] else 0.0 for t in part]
        begin += length
        if kind.startswith("sequence"):
            of = [np.exp(sum(logs))] * length
        elif kind == "geometric_mis":
            of = [np.exp(sum(logs) / max(sum(known[t] for t in part), 1))] * length
        else:
            of = [np.exp(log) for log in logs]
        for t, ratio in zip(part, of, strict=True):
            if kind == "kpop":
                p, q = np.exp(old[t]), np.exp(rollout[t])
                apart = max(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) for p, q in ((p, q), (q, p)))
                weights.append(ratio if not known[t] or apart <= high else 0.0)
            elif kind.endswith("tis"):
                weights.append(min(ratio, high))
            elif not low <= ratio <= high:
                weights.append(0.0)
            else:
                weights.append(1.0 if kind == "geometric_mis" else ratio)
    return np.array(weights)


def computed(kind, old, rollout, known, lengths, low, high):
    sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    rows = Rows(torch.as_tensor(old).requires_grad_(), torch.as_tensor(old), torch.zeros(len(old)), sequence)
    return importance_weights(kind, rows, torch.as_tensor(rollout), torch.as_tensor(known), low, high)


@pytest.mark.parametrize("kind", list(BOUNDS))
@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_each_correction_equals_an_independent_float64_computation(kind, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 8, 5)
    total = int(lengths.sum())
    old = np.minimum(random.normal(-2, 0.5, total), -0.01)
    rollout = np.minimum(old + random.normal(0, random.choice([1e-3, 0.5]), total), -0.001)
    known = random.random(total) < 0.8
    low, high = BOUNDS[kind] if seed % 2 else (0.8, 1.25)
    made = computed(kind, old, rollout, known, lengths, low, high)
    expected = oracle(kind, old, rollout, known, lengths, low, high)
    np.testing.assert_allclose(made.values.numpy(), expected, rtol=1e-12)
    assert not made.values.requires_grad
    untouched = ~made.touched.numpy()
    assert (made.values.numpy()[untouched] > 0).all()


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_where_the_engine_agrees_with_the_trainer_no_weight_is_touched(kind):
    old = np.full(6, -1.5)
    made = computed(kind, old, old, np.ones(6, np.bool_), [2, 4], *BOUNDS[kind])
    assert made.values.tolist() == [1.0] * 6
    assert not made.touched.any()


def test_exact_values():
    old, rollout = np.log([0.3, 0.3, 0.3]), np.log([0.1, 0.3, 0.9])  # rho = 3, 1, 1/3
    known = np.ones(3, np.bool_)
    assert computed("tis", old, rollout, known, [3], 0.0, 2.0).values.tolist() == pytest.approx([2, 1, 1 / 3])
    assert computed("mis", old, rollout, known, [3], 0.0, 2.0).values.tolist() == pytest.approx([0, 1, 1 / 3])
    assert computed("icepop", old, rollout, known, [3], 0.5, 5.0).values.tolist() == pytest.approx([3, 1, 0])
    assert computed("sequence_mis", old, rollout, known, [3], 0.0, 2.0).values.tolist() == pytest.approx([1, 1, 1])
    assert computed("sequence_tis", old, rollout, known, [1, 2], 0.0, 2.0).values.tolist() == pytest.approx(
        [2, 1 / 3, 1 / 3]
    )


def test_the_bounds_themselves_are_within():
    old, rollout, known = np.log([1.0, 0.5]), np.zeros(2), np.ones(2, np.bool_)  # rho = 1, 1/2, exactly
    made = computed("mis", old, rollout, known, [1, 1], 0.5, 1.0)
    assert made.values.tolist() == [1.0, 0.5]
    assert made.touched.tolist() == [False, False]
    assert computed("tis", old, rollout, known, [1, 1], 0.0, 1.0).touched.tolist() == [False, False]


def test_a_correction_asks_for_the_trainers_own_logprobs():
    with pytest.raises(ValidationError, match='set old_logprobs = "recompute"'):
        GrpoOptions(correction={"kind": "tis"})
    assert GrpoOptions(correction={"kind": "tis"}, old_logprobs="recompute").correction.kind == "tis"


# -- by default, where engine and trainer differ

TIS = {"old_logprobs": "recompute", "correction": {"kind": "tis"}}
ASYNCHRONOUS = {"max_staleness": 1}
MANY = {"minibatches": 2, "learning_rate": 1e-2}


async def trained(open_trainer, make_batch, gate, *, model=None, run=None, **options):
    """The weights after two batches, and what the second step reports."""
    trainer = await open_trainer(model, run=run, **MANY, **options)
    for version in (1, 2):
        metrics = await trainer.step(make_batch(seed=version, version=version), gate)
    return torch.cat([parameter.detach().flatten().float() for parameter in trainer.model.parameters()]), metrics


@pytest.mark.parametrize(
    "run", [{}, {"announced": {"engine/auto": True}}, {"announced": {"engine/float32": True}}], ids=str
)
async def test_where_nothing_differs_the_default_is_the_ratio_to_the_engine(open_trainer, make_batch, gate, run):
    weights, metrics = await trained(open_trainer, make_batch, gate, run=run)
    expected, _ = await trained(open_trainer, make_batch, gate, run=run, old_logprobs="rollout")
    assert torch.equal(weights, expected)
    assert not [name for name in metrics if name.startswith("correction/")]


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (ASYNCHRONOUS, torch.float32), ({}, torch.bfloat16), ({"announced": {"engine/float16": True}}, torch.float32),
        ({"announced": {"engine/unknown": True, "engine/auto": True}}, torch.float32),
    ],
    ids=str,
)  # fmt: skip
async def test_where_engine_and_trainer_differ_the_default_is_tis(open_trainer, make_batch, gate, model_of, run, dtype):
    model = model_of(dtype=dtype)
    own = {"dtype": "bfloat16"} if dtype == torch.bfloat16 else {}
    weights, metrics = await trained(open_trainer, make_batch, gate, model=model, run=run, **own)
    expected, reported = await trained(open_trainer, make_batch, gate, model=model, **own, **TIS)
    plain, _ = await trained(open_trainer, make_batch, gate, model=model, run=run, **own, old_logprobs="rollout")
    assert torch.equal(weights, expected)
    assert not torch.equal(weights, plain)
    assert metrics["correction/fraction"] == reported["correction/fraction"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": 0.1},
        {"dual_clip": 3.0},
        {"missing_logprobs": "refuse"},
        {"loss": "cispo"},
        {"loss": "vespo"},
        {"loss": "kpop"},
        {"loss": "dppo"},
    ],
    ids=str,
)
async def test_an_option_of_the_ratio_to_the_engine_keeps_that_ratio(open_trainer, make_batch, gate, options):
    weights, metrics = await trained(open_trainer, make_batch, gate, run=ASYNCHRONOUS, **options)
    expected, _ = await trained(open_trainer, make_batch, gate, **options, old_logprobs="rollout")
    assert torch.equal(weights, expected)
    assert "correction/mean" not in metrics


async def test_the_gap_and_the_share_of_tokens_that_were_cut_are_measured(open_trainer, make_batch, gate):
    trainer = await open_trainer(loss="dapo", learning_rate=0.0, run=ASYNCHRONOUS)
    batch = make_batch()
    sequences = [batch.tokens[start:end] for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)]
    own = np.concatenate(await trainer.logprobs(sequences))
    shift = np.random.default_rng(2).normal(0, 0.6, len(own)).astype(np.float32)
    shifted = replace(batch, logprobs=np.where(batch.sampled, own - shift, 0).astype(np.float32))
    metrics = await trainer.step(shifted, gate)
    at = batch.trained
    assert metrics["correction/gap"] == pytest.approx(np.abs(shift[at]).mean(), rel=1e-4)
    assert metrics["correction/fraction"] == pytest.approx((np.exp(shift[at]) > 2).mean(), abs=1e-6)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)


def test_a_correction_of_ones_own_asks_for_recompute_under_auto_too():
    with pytest.raises(ValidationError, match='set old_logprobs = "recompute"'):
        GrpoOptions(correction={"kind": "kpop"}, old_logprobs="auto")
