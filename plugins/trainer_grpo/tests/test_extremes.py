"""Every loss, option, correction and estimator of KL at log-ratios and advantages as far apart as float32 goes, in float32,
against float64 code that was written only from the formulas."""

import ast
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from atropos_core.errors import TrainingDiverged
from atropos_trainer_grpo.config import BOUNDS, GrpoOptions
from atropos_trainer_grpo.corrections import importance_weights
from atropos_trainer_grpo.kl_estimators import divergence
from atropos_trainer_grpo.losses import LOSSES, Clip, Rows
from atropos_trainer_grpo.non_finite import against_old, against_reference

FURTHEST = 60.0  # README.md, Losses: the bound of a log-ratio
APART = [0.0]
APART += [
    s * a
    for s in (-1, 1)
    for a in (1e-4, 0.1, 0.5, 1.5, 20.0, 21.0, 30.0, 59.0, 61.0, 87.0, 88.7, 88.8, 89.0, 200.0, 1e4)
]
ADVANTAGES = (0.0, 1e-30, -1e-30, 1e-3, -1e-3, 1.0, -1.0, 3.0, -3.0, 1e6, -1e6)
CLIPS = ((None, None), (0.0, 0.0), (0.05, 0.4), (1.0, 1e6))


def by_formula(name, apart, logprob, advantage, clip):
    """Value and slope of one token. The saturated ratio keeps pushing, as hard as at the bound."""
    low, high, dual = clip
    ratio = np.exp(min(apart, FURTHEST))
    if name == "reinforce":
        return -advantage * logprob, -advantage
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        reached = tau * (ratio - 1)
        up, down = 1 / (1 + np.exp(-reached)), 1 / (1 + np.exp(min(reached, 700.0)))
        return -4 / tau * up * advantage, -4 * up * down * ratio * advantage
    if name == "vespo":
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        phi = np.exp(k * min(apart, FURTHEST) + decay * (1 - ratio))
        return -phi * advantage * logprob, -phi * advantage
    if name == "dppo":
        moved = np.exp(min(logprob, 0.0)) - np.exp(min(logprob - apart, 0.0))
        kept = not (moved > 0.2 if advantage > 0 else moved < -0.2)
        return -ratio * advantage * kept, -ratio * advantage * kept
    if name == "kpop":
        p, q = (np.exp(np.clip(logs, -FURTHEST, -1e-6)) for logs in (logprob, logprob - apart))
        divergence = max(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) for p, q in ((p, q), (q, p)))
        kept = divergence <= 0.1
        return -ratio * advantage * kept, -ratio * advantage * kept
    if name == "cispo":
        weight = min(max(ratio, 1 - low), 1 + high)
        return -weight * advantage * logprob, -weight * advantage
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    if advantage < 0 and dual is not None and ratio > dual and name != "gmpo":  # it has no third bound
        return -dual * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def close(made, expected, apart, wider=1.0):
    """float32 has 6e-8 of the log-ratio itself, which exp turns into a part of the ratio."""
    np.testing.assert_allclose(made, expected, rtol=wider * (1e-6 + 1.5e-7 * min(abs(apart), 200.0)), atol=1e-36)


@pytest.mark.parametrize("bounds", CLIPS, ids=str)
@pytest.mark.parametrize("dual", [None, 1.5, 3.0, 1e9])
@pytest.mark.parametrize("name", list(LOSSES))
def test_value_and_gradient_are_right_for_every_finite_input(name, dual, bounds):
    loss = LOSSES[name]
    low, high = (own if bound is None else bound for own, bound in zip(loss.clip, bounds, strict=False))
    clip = Clip(low, high, dual)
    cases = [(np.float32(apart), np.float32(advantage)) for apart, advantage in product(APART, ADVANTAGES)]
    old = torch.tensor([-max(float(apart), 0.0) for apart, _ in cases])
    start = torch.tensor([min(float(apart), 0.0) for apart, _ in cases])
    logprobs = start.clone().requires_grad_()
    advantages = torch.tensor([float(advantage) for _, advantage in cases])
    made = loss(Rows(logprobs, old, advantages, torch.arange(len(cases))), clip)
    (slopes,) = torch.autograd.grad(made.values.sum(), logprobs)
    for i, (apart, advantage) in enumerate(cases):
        far = float(start[i].double() - old[i].double())
        if abs(np.exp(min(far, FURTHEST)) - np.array([1 - low, 1 + high, dual or 0])).min() < 1e-5:
            continue  # at a bound itself either side is right
        value, slope = by_formula(name, far, float(start[i]), float(advantage), clip)
        # A kernel's exponent has the ratio in it, and of that float32 has seven digits.
        wider = 1 + 3 * np.exp(min(far, 5.0)) if name in ("sapo", "vespo") else 1
        close(made.values[i].item(), value, apart, wider)
        close(slopes[i].item(), slope, apart, wider)
    assert made.ratio.isfinite().all()


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize(
    ("apart", "advantage"), list(product([-200.0, -89.0, -1.0, 1.0, 89.0, 200.0, 1e4], [1.0, -1.0]))
)
def test_gspo_is_right_for_sequences_that_moved_as_far(apart, advantage, dual):
    """A sequence of four tokens whose mean log-ratio is `apart`, and another one that did not move."""
    clip = Clip(3e-4, 4e-4, dual)
    of_tokens = np.array([2.0, 0.5, 1.5, 0.0]) * apart
    old = torch.tensor([*-np.maximum(of_tokens, 0), -1.0], dtype=torch.float32)
    logprobs = torch.tensor([*np.minimum(of_tokens, 0), -1.0], dtype=torch.float32, requires_grad=True)
    rows = Rows(logprobs, old, torch.tensor([advantage] * 4 + [0.5]), torch.tensor([0, 0, 0, 0, 1]))
    made = LOSSES["gspo"](rows, clip)
    (slopes,) = torch.autograd.grad(made.values.sum(), logprobs)
    value, slope = by_formula("gspo", apart, 0.0, advantage, clip)
    for token in range(4):
        close(made.values[token].item(), value, apart)
        close(slopes[token].item(), slope, apart)
    assert (made.values[4].item(), slopes[4].item()) == (-0.5, -0.5)


def test_a_clipped_token_with_a_large_ratio_leaves_the_gradient_of_the_others_alone():
    new = torch.full((4,), -1.0, requires_grad=True)
    rows = Rows(new, torch.tensor([-90.0, -1, -1, -1]), torch.tensor([1.0, 1, -1, -1]), torch.tensor([0, 0, 1, 1]))
    loss = (LOSSES["grpo"](rows, Clip(0.2, 0.2)).values * 0.25).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.05)
    assert new.grad.tolist() == pytest.approx([0.0, -0.25, 0.25, 0.25])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_kl_and_their_slopes_are_right_however_far_the_reference_is(estimator):
    apart = np.array([*APART, 1e-6, -1e-6, 1e-2, -1e-2], np.float32)
    reference = torch.tensor(-np.maximum(apart, 0))
    logprobs = torch.tensor(np.minimum(apart, 0), requires_grad=True)
    made = divergence(estimator, logprobs, reference)
    (slopes,) = torch.autograd.grad(made.sum(), logprobs)
    for value, slope, far in zip(made.tolist(), slopes.tolist(), apart.astype(np.float64), strict=True):
        back = max(far, -FURTHEST)
        expected = {"k1": far, "k2": far**2 / 2, "k3": np.expm1(-back) + far}[estimator]
        sloped = {"k1": 1.0, "k2": far, "k3": -np.expm1(-back)}[estimator]
        np.testing.assert_allclose(value, expected, rtol=1e-5 + 1.5e-7 * abs(far), atol=1e-7 * abs(far))
        close(slope, sloped, far)


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_corrections_are_right_however_far_the_engine_was(kind):
    apart = np.array(APART)
    old, rollout = torch.tensor(np.minimum(apart, 0)).float(), torch.tensor(-np.maximum(apart, 0)).float()
    low, high = BOUNDS[kind]
    rows = Rows(old, old, torch.ones_like(old), torch.arange(len(old)))
    made = importance_weights(kind, rows, rollout, torch.ones(len(old), dtype=torch.bool), low, high)
    for weight, touched, far in zip(made.values.tolist(), made.touched.tolist(), apart, strict=True):
        ratio = np.exp(min(far, 700.0))
        if kind == "kpop":  # where either is 1 and the other is not, but by very little, they do not agree
            close(weight, ratio * (abs(far) < 0.1), far)
            assert touched == (abs(far) >= 0.1)
            continue
        inside = low <= ratio <= high
        if abs(ratio - np.array([low, high])).min() < 1e-6:
            continue
        cut = ratio > high or (ratio < low and not kind.endswith("tis"))
        expected = min(ratio, high) if kind.endswith("tis") else (ratio if kind != "geometric_mis" else 1.0) * inside
        close(weight, expected, far)
        assert touched == cut


# -- in a trainer


async def trained(open_trainer, gate, batch, **options):
    trainer = await open_trainer(learning_rate=1e-2, **options)
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    metrics = await trainer.step(batch, gate)
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert after.isfinite().all()
    return metrics, before, after


def claiming(batch, logprob):
    """Every second sampled token claims to have been sampled with this logprob."""
    chosen = batch.sampled & (np.arange(len(batch.tokens)) % 2 == 0)
    return replace(batch, logprobs=np.where(chosen, logprob, batch.logprobs).astype(np.float32))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "luspo"])
async def test_no_logprob_that_a_sender_may_claim_ends_a_run(open_trainer, make_batch, gate, name, dual):
    for logprob in (-90.0, -1e3, -1e30):
        metrics, before, after = await trained(
            open_trainer, gate, claiming(make_batch(), logprob), loss=name, dual_clip=dual
        )
        assert dual is not None or not torch.equal(before, after)
        assert np.isfinite(metrics["ratio/mean"])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("logprob", [-21.0, -89.0, -1e3, 0.0])
async def test_no_reference_logprob_that_a_sender_may_claim_ends_a_run(
    open_trainer, make_batch, gate, estimator, logprob
):
    from atropos_core.types import Column

    batch = make_batch()
    claimed = Column("token", np.where(batch.sampled, logprob, 0).astype(np.float32), batch.sampled.copy())
    batch = replace(batch, columns={**batch.columns, "ref_logprobs": claimed})
    await trained(open_trainer, gate, batch, kl={"estimator": estimator})


async def test_a_gradient_beyond_the_squares_of_float32_is_scaled_down_like_any_other(open_trainer, make_batch, gate):
    """Its direction is that of the same batch with advantages of ordinary size."""
    batch = make_batch()
    moved = []
    for scale in (1e3, 1e22):
        scaled = replace(batch, advantages=(batch.advantages * scale).astype(np.float32), logprobs=batch.logprobs)
        _, before, after = await trained(open_trainer, gate, scaled, loss="reinforce", max_grad_norm=1e-3, eps=1e-3)
        moved.append(after - before)
    torch.testing.assert_close(*moved, rtol=1e-3, atol=1e-6)
    assert moved[0].abs().max() > 1e-4


async def test_what_cannot_be_computed_is_named_by_its_cause_and_not_by_the_learning_rate(
    open_trainer, make_batch, gate
):
    trainer = await open_trainer()
    batch = make_batch()
    with pytest.raises(TrainingDiverged) as caught:
        await trainer.step(replace(batch, advantages=np.where(batch.trained, 3e38, 0).astype(np.float32)), gate)
    assert "advantage" in str(caught.value) and "3e+38" in str(caught.value)
    assert "learning_rate" not in str(caught.value)
    assert gate.entered == 0
    with torch.no_grad():
        next(iter(trainer.model.parameters())).fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="weights .* not finite") as caught:
        await trainer.step(batch, gate)
    assert "learning_rate" in str(caught.value)


# -- what is advised


def accepted(options):
    try:
        return GrpoOptions.model_validate(options)
    except ValidationError:
        return None


CHOSEN = [
    {"loss": loss, "old_logprobs": old, "epochs": epochs, **clips}
    for loss, old, epochs in product(
        ("grpo", "dapo", "gspo", "cispo", "reinforce", "luspo", "sapo"), ("rollout", "recompute"), (1, 2)
    )
    for clips in ({}, {"dual_clip": 5.0}, {"clip_low": 0.1, "clip_high": 0.3})
]


def advised(text):
    """`trainer.dual_clip = 3` in an advice -> dual_clip, 3."""
    for path, value in re.findall(r'trainer\.([\w.]+) = ("\w+"|\d+)', text):
        yield path.split("."), ast.literal_eval(value)


@pytest.mark.parametrize("options", [options for options in CHOSEN if accepted(options)], ids=str)
def test_what_is_advised_against_large_ratios_can_be_set_and_is_not_set_already(options):
    text = against_old(made := accepted(options))
    assert "recompute" not in text or made.old_logprobs == "rollout"
    left_out = re.findall(r"trainer\.(\w+)", text.partition("and leave")[2].partition(" out")[0])
    for [name], value in advised(text):
        assert getattr(made, name) != value, text
        rest = {key: each for key, each in options.items() if not (name == "old_logprobs" and key in left_out)}
        assert accepted({**rest, name: value}), text


@pytest.mark.parametrize(
    "kl", [{"estimator": "k2"}, {"estimator": "k3"}, {"estimator": "k1", "place": "reward"}], ids=str
)
def test_what_is_advised_against_a_far_reference_can_be_set_and_is_not_set_already(kl):
    text = against_reference(accepted({"kl": kl}))
    for (_, name), value in advised(text):
        assert kl[name] != value, text
        assert accepted({"kl": {**kl, name: value}}), text
