"""What is sent to a Tinker server has the loss and the gradient of the trainer `grpo`, by token, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atropos_core.types import Batch, Column
from atropos_tinker_client.config import TinkerTrainerOptions
from atropos_tinker_client.losses import form_of, gspo, trained_tokens, weights_of
from atropos_trainer_grpo.losses import LOSSES, Clip, Rows, token_weights

LENGTHS = [6, 9, 4, 7, 5]
EPISODE = [0, 0, 1, 2, 3]  # the first two sequences are one episode
GROUP = [0, 0, 0, 1, 1]


def make_batch(seed: int = 0) -> tuple[Batch, Any]:
    """Return a batch of stale rollouts, and the policy's logprobs [N] of its tokens."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    count, sequences = int(offsets[-1]), len(LENGTHS)
    prompt = np.concatenate([np.arange(length) < 2 for length in LENGTHS])
    old = np.where(prompt, 0, -random.uniform(0.1, 3, count)).astype(np.float32)
    advantage = np.repeat(random.normal(size=sequences).astype(np.float32)[EPISODE], LENGTHS)
    batch = Batch(
        tokens=random.integers(3, 60, count).astype(np.int32),
        offsets=offsets,
        sampled=~prompt,
        trained=~prompt & (random.random(count) < 0.8),
        logprobs=old,
        has_logprobs=np.ones(sequences, np.bool_),
        policy_version=np.zeros(count, np.int32),
        advantages=np.where(prompt, 0, advantage).astype(np.float32),
        temperature=np.ones(sequences, np.float32),
        truncated=np.zeros(sequences, np.bool_),
        group=np.array(GROUP, np.int32),
        version=1,
        columns={
            "episode": Column(axis="sequence", values=np.array(EPISODE, np.int32), present=np.ones(sequences, np.bool_))
        },
    )
    return batch, old.astype(np.float64) + random.normal(scale=0.6, size=count)


def reference(batch: Batch, new: Any, options: TinkerTrainerOptions) -> tuple[float, Any]:
    """Return the loss of the trainer `grpo` and its gradient [N]. The batch's sequences are in the order of their episodes."""
    loss = LOSSES[options.loss]
    trained = np.flatnonzero(trained_tokens(batch))
    starts = [batch.offsets[at] for at in range(len(EPISODE)) if at == 0 or EPISODE[at] != EPISODE[at - 1]]
    weights = token_weights(
        options.average or loss.average,
        trained_tokens(batch),
        np.array([*starts, len(batch.tokens)]),
        options.loss_length,
    )
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    low = loss.clip.low if options.clip_low is None else options.clip_low
    high = (
        (low if loss.clip.low == loss.clip.high else loss.clip.high) if options.clip_high is None else options.clip_high
    )
    rows = Rows(
        logprobs=logprobs[trained],
        old=torch.tensor(batch.logprobs, dtype=torch.float64)[trained],
        advantages=torch.tensor(batch.advantages, dtype=torch.float64)[trained],
        sequence=torch.tensor(np.repeat(EPISODE, LENGTHS)[trained]),
    )
    total = (loss(rows, Clip(low, high)).values * torch.tensor(weights[trained], dtype=torch.float64)).sum()
    total.backward()
    assert logprobs.grad is not None
    return float(total), logprobs.grad.numpy()


def at_the_server(sent_as: str, columns: dict[str, Any], new: Any, low: float, high: float) -> tuple[float, Any]:
    """Return the loss of the server and its gradient [N], by the formulas of Tinker's documentation of losses."""
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    given = {name: torch.tensor(np.asarray(value, np.float64)) for name, value in columns.items()}
    if sent_as == "cross_entropy":
        total = -(given["weights"] * logprobs).sum()
    else:
        ratio, advantages = (logprobs - given["logprobs"]).exp(), given["advantages"]
        clipped = ratio.clamp(low, high)
        if sent_as == "ppo":
            total = -torch.minimum(ratio * advantages, clipped * advantages).sum()
        else:
            total = -(clipped.detach() * logprobs * advantages).sum()
    total.backward()
    assert logprobs.grad is not None
    return float(total), logprobs.grad.numpy()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"average": "token", "clip_low": 0.1},
    {"loss": "dr_grpo", "loss_length": 20},
    {"loss": "dapo"},
    {"loss": "dapo", "average": "sequence", "clip_high": 0.5},
    {"loss": "cispo"},
    {"loss": "cispo", "clip_high": 0.3, "average": "sum"},
    {"loss": "reinforce"},
    {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    {"loss": "gspo", "average": "token"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_at_the_server_is_that_of_trainer_grpo(options: dict[str, Any], seed: int) -> None:
    chosen = TinkerTrainerOptions(**options)
    batch, new = make_batch(seed)
    form = form_of(chosen)
    factors = weights_of(batch, form.average, chosen.loss_length) * batch.advantages
    loss, gradient = reference(batch, new, chosen)
    own = None
    if chosen.loss == "gspo":
        own, found = gspo(batch, new, batch.logprobs, factors, form)
        columns = {"weights": -found}
    elif form.sent_as == "cross_entropy":
        columns = {"weights": factors}
    else:
        columns = {"logprobs": batch.logprobs, "advantages": factors}
    sent, found = at_the_server(form.sent_as, columns, new, 1 - form.low, 1 + form.high)
    np.testing.assert_allclose(found, gradient, atol=1e-7)
    assert np.abs(gradient).max() > 1e-3
    assert (sent if own is None else own) == pytest.approx(loss, abs=1e-6)


def test_sequences_in_another_order_have_the_same_factors() -> None:
    batch, _ = make_batch()
    order = np.array([4, 1, 3, 0, 2])
    spans = [np.arange(batch.offsets[at], batch.offsets[at + 1]) for at in order]
    for average in ("sequence", "token", "constant", "sum"):
        expected = weights_of(batch, average, 10)[np.concatenate(spans)]
        np.testing.assert_array_equal(weights_of(batch.select(order), average, 10), expected)
