"""Logprobs of given tokens, without ever holding logits for all of them.

The backward pass computes the logits of a chunk again rather than keep them: memory is a chunk or two of [rows, vocabulary],
however long the batch. When everything fits in one chunk its probabilities are kept, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atropos_trainer_grpo.chunks import rows_at_once


class Scored(NamedTuple):
    """Per row [R], all with a gradient."""

    logprobs: Tensor
    entropy: Tensor  # of the whole distribution, in nats
    others: Tensor | None = None  # [R, K] of the further tokens that were requested
    outside: Tensor | None = (
        None  # [R] log of the probability of all but those: from the logits, not as what is missing to 1
    )


def token_logprobs(
    hidden: Tensor,  # [R, C] what the language-model head sees, at the positions before `targets`
    head: torch.nn.Linear,
    targets: Tensor,  # i64[R]
    temperature: Tensor | None,  # f32[R]; None: 1 throughout
    chunk: int,
    others: Tensor | None = None,  # i64[R, K] further tokens at each position; one may be named twice
) -> Scored:
    """log softmax(head(hidden) / temperature)[targets], in fp32 (fp64 for a float64 model), and the same for `others` and for
    what is outside them (-inf where nothing is)."""
    if not len(targets):
        empty = hidden.sum(dim=1)  # keeps the graph: backward() on a loss of nothing gives zeros
        if others is None:
            return Scored(empty, empty.detach())
        return Scored(empty, empty.detach(), others.to(empty.dtype), empty.detach())
    return Scored(*_score(hidden, head.weight, head.bias, targets, temperature, chunk, others))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, chunk: int,
        others: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        chunk = rows_at_once(chunk, len(weight), hidden.device.type)
        made: list[tuple[Tensor, Tensor]] = []
        further: list[Tensor] = []
        beyond: list[Tensor] = []
        kept: Tensor | None = None
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits = _logits(hidden[part], weight, bias, temperature, part)  # [r, V]
            logs = torch.log_softmax(logits, dim=-1)
            logprobs = logs.gather(1, targets[part, None])[:, 0]
            if others is not None:
                further.append(logs.gather(1, others[part]))
                beyond.append(logs.scatter(1, others[part], -torch.inf).logsumexp(dim=1))
            probabilities = torch.exp(logs, out=logits)
            # 0 * -inf where masked. In place: a product of its own would be as large again.
            entropy = -logs.clamp_min_(-1e4).mul_(probabilities).sum(dim=-1)
            made.append((logprobs, entropy))
            kept = probabilities if len(targets) <= chunk else None
            del logits, logs, probabilities  # before the next chunk's are made
        logprobs, entropy = (torch.cat(parts) for parts in zip(*made, strict=True))
        ctx.chunk = chunk
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, kept, entropy, others)
        ctx.set_materialize_grads(False)  # most losses ask nothing of the entropy
        return logprobs, entropy, torch.cat(further) if further else None, torch.cat(beyond) if beyond else None

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_entropy: Tensor | None, of_others: Tensor | None, of_outside: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, kept, entropy, others = ctx.saved_tensors
        into_hidden = torch.empty_like(hidden)
        # Where earlier micro-batches have left a gradient, it is added to at once: the largest there is need not be there twice.
        present = weight.grad if ctx.needs_input_grad[1] and weight.is_leaf else None
        into_weight = present
        if present is None and ctx.needs_input_grad[1]:
            into_weight = torch.zeros_like(weight)
        into_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for begin in range(0, len(targets), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            p, rest = kept, None
            if p is None or of_outside is not None:
                logits = _logits(hidden[part], weight, bias, temperature, part)
                if of_outside is not None:  # d log outside / d logits = softmax over the others' others - p
                    rest = logits.scatter(1, others[part], -torch.inf).softmax(dim=-1).nan_to_num_(0.0)
                p = torch.softmax(logits, dim=-1) if p is None else p
            by = p.new_ones(1) if temperature is None else temperature[part].to(p.dtype)  # [r], or [1]
            extra: Tensor | None = None
            if of_entropy is not None:  # d H / d logits = -p (log p + H)
                extra = p.log().clamp_min_(-1e4).add_(entropy[part, None])
                extra.mul_(p).mul_((of_entropy[part] / by)[:, None])
            into: list[tuple[Tensor, Tensor]] = []  # tokens, and what comes back to their logprobs: [r, 1] and [r, K]
            if grad is not None:
                into.append((targets[part, None], (grad[part] / by)[:, None]))
            if of_others is not None:
                into.append((others[part], of_others[part] / by[:, None]))
            scales = [scale for _, scale in into]
            if of_outside is not None:
                scales.append((of_outside[part] / by)[:, None])
            if scales:  # d log p[token] / d logits = 1[token] - p
                back = -torch.cat(scales, dim=1).sum(dim=1, keepdim=True)
                logits = p * back if kept is not None else p.mul_(back)  # what is kept may be needed again
                for token, scale in into:
                    logits.scatter_add_(1, token, scale)
                if rest is not None:
                    logits.addcmul_(rest, scales[-1])
            else:
                logits = torch.zeros_like(p)
            if extra is not None:
                logits -= extra
            logits = logits.to(hidden.dtype)
            torch.mm(logits, weight, out=into_hidden[part])
            if into_weight is not None:
                into_weight.addmm_(logits.t(), hidden[part])
            if into_bias is not None:
                into_bias += logits.sum(dim=0)
            del p, logits, extra, rest
        return into_hidden, into_weight if present is None else None, into_bias, None, None, None, None


_score: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = (
    _TokenLogprobs.apply
)  # torch leaves apply untyped


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, part: slice) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature is None else logits.div_(temperature[part, None].to(logits.dtype))
