"""Claims against recomputed logprobs: honest ones pass however far a policy moved, made-up ones do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atropos_core.health.alignment import EVIDENCE_NATS, MOVED, compare, moved_column, owner
from atropos_core.training.batch import to_batch
from atropos_core.types import UNKNOWN_VERSION, Batch, Floats
from tests.unit.parts import episode, group, rollout

WORDS = 50


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def sampled_from(random: np.random.Generator, length: int, shift: float, sequences: int = 8) -> tuple[Batch, Floats]:
    """Tokens of a policy of version 3, and their logprobs [N] under one that moved by `shift` since."""
    rollouts, now = [], []
    for _ in range(sequences):
        logits = random.normal(0, 2, (length, WORDS))
        before, after = softmax(logits), softmax(logits + random.normal(0, shift, (length, WORDS)))
        drawn = np.array([random.choice(WORDS, p=one) for one in before])
        at = np.arange(length), drawn
        claimed = np.concatenate([[0.0], np.log(before[at])]).astype(np.float32)
        tokens = np.concatenate([[0], drawn]).astype(np.int32)
        rollouts.append(rollout(1, length, version=3, tokens=tokens, logprobs=claimed))
        now.append(np.concatenate([[0.0], np.log(after[at])]))
    made = replace(group(0, [0.0]), episodes=(episode(0.0, "", *rollouts),)).with_advantages(np.zeros(1))
    return to_batch([made], version=6), np.concatenate(now).astype(np.float32)


def judged(batch: Batch, now: Floats, moved: float | None, **changes: np.ndarray) -> dict[str, float]:
    column = moved_column([moved] * batch.sequences)
    every = np.ones(len(now), np.bool_)
    return compare(replace(batch, columns={MOVED: column}, **changes), now, every, every)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_honest_tokens_of_old_weights_are_never_impossible_however_far_the_policy_moved(shift, seed):
    batch, now = sampled_from(np.random.default_rng(seed), 200, shift)
    metrics = judged(batch, now, moved=None)
    assert metrics["alignment/impossible_nats"] < EVIDENCE_NATS / 2
    metrics = judged(batch, now, moved=2 * shift)  # what 256 tokens of a probe show at the most
    assert metrics["alignment/impossible_nats"] < EVIDENCE_NATS / 2
    assert metrics["alignment/unexplained_nats"] < 10
    assert metrics["alignment/unchecked_share"] == 0.0


@pytest.mark.parametrize("version", [3, UNKNOWN_VERSION])
@pytest.mark.parametrize("forged", ["far too low", "noise", "certain", "another policy's tokens"])
def test_one_made_up_sequence_among_honest_ones_is_impossible_and_is_named(forged, version):
    random = np.random.default_rng(1)
    batch, now = sampled_from(random, 60, 0.05)
    mine = np.repeat(np.arange(batch.sequences) == 5, batch.lengths) & batch.sampled
    claims = {
        "far too low": np.full(len(now), -12.0),
        "noise": random.normal(-8, 1, len(now)),
        "certain": np.zeros(len(now)),
        "another policy's tokens": np.full(len(now), -1.0),
    }[forged]
    if forged == "another policy's tokens":
        now = np.where(mine, random.normal(-7, 2, len(now)), now).astype(np.float32)
    logprobs = np.where(mine, claims, batch.logprobs).astype(np.float32)
    versions = np.where(mine, version, batch.policy_version).astype(np.int32)
    metrics = judged(batch, now, 0.01, logprobs=logprobs, policy_version=versions)
    assert metrics["alignment/impossible_nats"] > EVIDENCE_NATS
    assert metrics["alignment/worst_stale"] == 5


def test_claims_above_what_the_policy_gives_are_no_proof_where_its_movement_is_not_known():
    batch, now = sampled_from(np.random.default_rng(2), 60, 0.05)
    certain = np.where(batch.sampled, 0, batch.logprobs).astype(np.float32)
    assert judged(batch, now, None, logprobs=certain)["alignment/impossible_nats"] == 0.0


@pytest.mark.parametrize(("temperature", "found"), [(1.0, False), (0.8, True), (1.3, True)])
def test_sampling_at_another_temperature_than_claimed_is_found_though_every_logprob_is_right(temperature, found):
    random = np.random.default_rng(5)
    logits = random.normal(0, 2, (2000, WORDS))
    p, q = softmax(logits), softmax(logits / temperature)
    drawn = np.array([random.choice(WORDS, p=one) for one in q])
    printed = np.concatenate([[0.0], np.log(p[np.arange(2000), drawn])]).astype(np.float32)
    entropy = np.concatenate([[0.0], -(p * np.log(p)).sum(axis=1)]).astype(np.float32)
    tokens = np.concatenate([[0], drawn]).astype(np.int32)
    one = replace(
        group(0, [0.0]), episodes=(episode(0.0, "", rollout(1, 2000, version=3, tokens=tokens, logprobs=printed)),)
    )
    every = np.ones(2001, np.bool_)
    metrics = compare(to_batch([one.with_advantages(np.zeros(1))], version=4), printed, every, every, entropy)
    assert metrics["alignment/max_abs_logprob_diff"] == 0.0
    assert (abs(metrics["alignment/surprise_z"]) > 6) == found


def test_what_cannot_be_compared_is_counted():
    batch, now = sampled_from(np.random.default_rng(3), 10, 0.0)
    silent, cut = np.arange(8) == 1, np.arange(8) >= 6
    metrics = judged(batch, now, 0.0, has_logprobs=~silent, truncated=cut)
    assert metrics["alignment/unchecked_share"] == pytest.approx(3 / 8)
    assert metrics["alignment/without_logprobs"] == 1
    nothing = compare(batch, now, np.zeros(len(now), np.bool_), np.zeros(len(now), np.bool_))
    assert nothing["alignment/unchecked_share"] == 1.0 and nothing["alignment/impossible_nats"] == 0.0


def cut_to(odds: np.ndarray, top_p: float) -> np.ndarray:
    """[T, V] renormalised over the likeliest tokens that hold `top_p` of each row."""
    order = np.argsort(-odds, axis=1)
    before = np.cumsum(np.take_along_axis(odds, order, axis=1), axis=1) - np.take_along_axis(odds, order, axis=1)
    kept = np.zeros_like(odds)
    np.put_along_axis(kept, order, (before < top_p).astype(float), axis=1)
    return odds * kept / (odds * kept).sum(axis=1, keepdims=True)


def sampled_with_top_p(top_p: float, shift: float, seed: int = 0, version: int = 4) -> tuple[Batch, Floats]:
    """As `sampled_from`, with each distribution cut; the trainer's logprobs [N] are of the whole one."""
    random = np.random.default_rng(seed)
    rollouts, now = [], []
    for _ in range(8):
        logits = random.normal(0, 2, (100, WORDS))
        odds, after = cut_to(softmax(logits), top_p), softmax(logits + random.normal(0, shift, (100, WORDS)))
        drawn = np.array([random.choice(WORDS, p=one) for one in odds])
        at = np.arange(100), drawn
        claimed = np.concatenate([[0.0], np.log(odds[at])]).astype(np.float32)
        tokens = np.concatenate([[0], drawn]).astype(np.int32)
        rollouts.append(replace(rollout(1, 100, version=3, tokens=tokens, logprobs=claimed), truncated=True))
        now.append(np.concatenate([[0.0], np.log(after[at])]))
    made = replace(group(0, [0.0]), episodes=(episode(0.0, "", *rollouts),)).with_advantages(np.zeros(1))
    return to_batch([made], version=version), np.concatenate(now).astype(np.float32)


@pytest.mark.parametrize("top_p", [0.99, 0.9, 0.5, 0.01])
def test_truncated_tokens_of_the_same_weights_are_never_called_wrong(top_p):
    metrics = judged(*sampled_with_top_p(top_p, 0.0), moved=0.0)
    assert metrics["alignment/truncated_excess_nats"] < 1e-5
    assert metrics["alignment/fresh_tokens"] == 0 and metrics["alignment/max_abs_logprob_diff"] == 0
    assert metrics["alignment/unchecked_share"] == metrics["alignment/truncated_share"] == 1.0


@pytest.mark.parametrize("top_p", [0.99, 0.9, 0.5])
def test_truncated_tokens_of_other_weights_are_found(top_p):
    metrics = judged(*sampled_with_top_p(top_p, 0.3), moved=0.0)
    assert metrics["alignment/truncated_excess_nats"] > 0.1


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.99, 0.5, 0.01])
def test_honest_truncated_tokens_of_old_weights_are_never_impossible(shift, top_p):
    for moved in (None, 2 * shift):
        metrics = judged(*sampled_with_top_p(top_p, shift, version=6), moved=moved)
        assert metrics["alignment/impossible_nats"] < EVIDENCE_NATS / 2 and metrics["alignment/unexplained_nats"] < 10
        assert "alignment/truncated_excess_nats" not in metrics


def test_truncated_tokens_of_old_weights_with_made_up_logprobs_are_impossible():
    batch, now = sampled_with_top_p(0.9, 0.05, version=6)
    low = np.where(batch.sampled, -12.0, 0.0).astype(np.float32)
    assert judged(replace(batch, logprobs=low), now, moved=0.01)["alignment/impossible_nats"] > EVIDENCE_NATS


@pytest.mark.parametrize("sequence", [0, 3, 7])
@pytest.mark.parametrize("place", [1, 5, 10])
def test_the_fresh_sequence_that_differs_most_is_reported(sequence, place):
    batch, now = sampled_from(np.random.default_rng(4), 10, 0.0)
    fresh = replace(batch, version=4)  # sampled under the very weights that are trained
    now[int(batch.offsets[sequence]) + place] -= 0.5
    metrics = judged(fresh, now, 0.0)
    assert metrics["alignment/max_abs_logprob_diff"] == pytest.approx(0.5, abs=1e-3)
    assert metrics["alignment/worst_fresh"] == sequence


def test_the_sequences_of_a_batch_are_named_by_whose_they_are():
    groups = [group(4, (0.0, 1.0)), replace(group(7, [1.0]), episodes=(episode(1.0, "", rollout(), rollout()),))]
    assert owner(groups, 1) == "rollout 1 of task 'train-4' of environment 'words'"
    assert owner(groups, 3) == "rollout 0 of task 'train-7' of environment 'words'"
