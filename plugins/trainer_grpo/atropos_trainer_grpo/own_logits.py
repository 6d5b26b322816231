"""Logprobs from logits that the model's own forward pass makes from hidden states: with its softcap, scale or multiplier.

The last part of a model's forward is all that it does to the hidden states of its body. It is run for some positions at a time, by
answering for the body with hidden states that are there already. Pieces are computed again in the backward pass, so logits of all
positions never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atropos_trainer_grpo.chunks import rows_at_once
from atropos_trainer_grpo.kept_tokens import KeptRows
from atropos_trainer_grpo.logprobs import Scored

LOWEST = -1e4  # of a logprob in the entropy: masked logits would give 0 * -inf


def own_logprobs(
    model: Any,  # a transformers model
    hidden: Tensor,  # [R, C] what the body returned at the positions before `targets`
    vocabulary: int,
    targets: Tensor,  # i64[R]
    temperature: Tensor | None,  # f32[R]; None: 1 throughout
    chunk: int,
    others: Tensor | None = None,  # i64[R, K]
    kept: KeptRows | None = None,  # of R rows
) -> Scored:
    """Compute what `token_logprobs` does, from the model's own logits."""
    chunk = rows_at_once(chunk, vocabulary, hidden.device.type)

    def piece(begin: int, states: Tensor) -> tuple[Tensor, ...]:
        part = slice(begin, begin + chunk)
        with _answering(model.base_model, _Answer(states[None])):
            made = model(input_ids=torch.zeros(1, len(states), dtype=torch.int64, device=states.device))
        logits = made.logits[0]
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        if temperature is not None:
            logits = logits / temperature[part, None].to(logits.dtype)
        return _scored(logits, targets[part], None if others is None else others[part], kept, part)

    several = len(targets) > chunk and torch.is_grad_enabled()
    made = []
    for begin in range(0, max(len(targets), 1), chunk):
        states = hidden[begin : begin + chunk]
        made.append(checkpoint(piece, begin, states, use_reentrant=False) if several else piece(begin, states))
    logprobs, entropy, mass, *rest = (torch.cat(parts) for parts in zip(*made, strict=True))
    further, beyond = rest or (None, None)
    return Scored(logprobs, entropy, further, beyond, None if kept is None else mass.detach())


def _scored(
    logits: Tensor, targets: Tensor, others: Tensor | None, kept: KeptRows | None, part: slice
) -> tuple[Tensor, ...]:
    """Logprobs [r], entropy [r], mass of the kept tokens [r], and with `others` theirs [r, K] and that of all but them [r]."""
    outside = None if kept is None or not len(targets) else kept.outside(part, logits.shape[1])
    mass = logits.new_ones(len(logits))
    if outside is not None:
        whole = logits.detach().logsumexp(dim=1)
        logits = logits.masked_fill(outside, -torch.inf)
        mass = (logits.detach().logsumexp(dim=1) - whole).exp()
    logs = torch.log_softmax(logits, dim=-1)
    logprobs = logs.gather(1, targets[:, None])[:, 0]
    entropy = -(logs.exp() * logs.clamp_min(LOWEST)).sum(dim=-1)
    if others is None:
        return logprobs, entropy, mass
    rest = logs.scatter(1, others, -torch.inf)
    some = (rest > -torch.inf).any(dim=1)  # none is left if the others are the whole vocabulary
    beyond = torch.where(some[:, None], rest, 0.0).logsumexp(dim=1).masked_fill(~some, -torch.inf)
    return logprobs, entropy, mass, logs.gather(1, others), beyond


class _Answer:
    """A body's output with nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _answering(body: Any, answer: Any) -> Iterator[None]:
    """Have the model's body return `answer` instead of computing it."""
    own = vars(body).get("forward")
    body.forward = lambda *arguments, **keywords: answer  # hides the method of its class
    try:
        yield
    finally:
        del body.forward
        if own is not None:
            body.forward = own
