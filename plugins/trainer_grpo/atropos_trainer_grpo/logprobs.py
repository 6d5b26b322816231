"""Logprobs of given tokens, without ever holding logits for all of them.

The backward pass computes the logits of a chunk again rather than keep them: memory is a chunk or two of [rows, vocabulary],
however long the batch. When everything fits in one chunk its probabilities are kept, and nothing is computed twice. On a GPU
logprob_kernels.py goes over the logits, once each way; what needs more than the targets' logprobs stays with torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atropos_trainer_grpo.architecture import PLAIN, LogitForm
from atropos_trainer_grpo.chunks import in_one_pass, rows_at_once
from atropos_trainer_grpo.kept_tokens import KeptRows, renormalise_

HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch for CUDA on Linux brings it


class Scored(NamedTuple):
    """Per row [R], all but the mass with a gradient. Of the distribution that the token was sampled from: if the sampler kept only
    some tokens, it is renormalised over these."""

    logprobs: Tensor
    entropy: Tensor  # of that distribution, in nats
    others: Tensor | None = None  # [R, K] of the further tokens that were requested
    outside: Tensor | None = (
        None  # [R] log of the probability of all but those: from the logits, not as what is missing to 1
    )
    mass: Tensor | None = None  # [R] of the kept tokens in the whole distribution, 1 if nothing was cut


class HeadAdapter(NamedTuple):
    """A LoRA adapter of the head: it adds `inner` times the transpose of `outer` to the head's output."""

    inner: Tensor  # [R, r] what its first matrix makes of the hidden states, scaled
    outer: Tensor  # [V, r] its second matrix, in their dtype


def token_logprobs(
    hidden: Tensor,  # [R, C] what the language-model head sees, at the positions before `targets`
    head: torch.nn.Linear,
    targets: Tensor,  # i64[R]
    temperature: Tensor | None,  # f32[R]; None: 1 throughout
    chunk: int,
    others: Tensor | None = None,  # i64[R, K] further tokens at each position; one may be named twice
    kept: KeptRows | None = None,  # of R rows
    form: LogitForm = PLAIN,
    adapter: HeadAdapter | None = None,
) -> Scored:
    """Compute log softmax(form(head(hidden)) / temperature)[targets] in fp32 (fp64 for a float64 model), and the same for `others`
    and for all tokens outside them (-inf if there are none). With `kept`, the softmax is over the kept tokens of each row."""
    if not len(targets):
        empty = hidden.sum(dim=1)  # keeps the graph: backward() on a loss of nothing gives zeros
        if others is None:
            return Scored(empty, empty.detach())
        return Scored(empty, empty.detach(), others.to(empty.dtype), empty.detach())
    if form.scale != 1 and form.cap is None:  # a scale is a temperature
        whole = torch.ones(len(targets), device=hidden.device) if temperature is None else temperature
        temperature = (whole.double() / form.scale).to(
            torch.float64 if hidden.dtype == torch.float64 else torch.float32
        )
        form = PLAIN
    more = others is not None or kept is not None or form.cap is not None or adapter is not None
    if in_one_pass(hidden.device.type, hidden.dtype == torch.float64, more) and HAS_TRITON:
        return Scored(*by_kernels(hidden, head.weight, head.bias, targets, temperature, chunk))
    inner, outer = (None, None) if adapter is None else adapter
    return Scored(
        *by_torch(hidden, head.weight, head.bias, targets, temperature, chunk, others, kept, form, inner, outer)
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, chunk: int,
        others: Tensor | None, kept_tokens: KeptRows | None, form: LogitForm, inner: Tensor | None, outer: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        chunk = rows_at_once(chunk, len(weight), hidden.device.type)
        made: list[tuple[Tensor, Tensor]] = []
        further: list[Tensor] = []
        beyond: list[Tensor] = []
        masses: list[Tensor] = []
        kept: Tensor | None = None
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits = _logits(hidden[part], weight, bias, temperature, part, form, inner, outer)[0]  # [r, V]
            logs = torch.log_softmax(logits, dim=-1)
            if kept_tokens is not None:
                outside = kept_tokens.outside(part, len(weight))
                masses.append(logs.new_ones(len(logs)) if outside is None else renormalise_(logs, outside))
                del outside
            logprobs = logs.gather(1, targets[part, None])[:, 0]
            if others is not None:
                further.append(logs.gather(1, others[part]))
                beyond.append(logs.scatter(1, others[part], -torch.inf).logsumexp(dim=1))
            probabilities = torch.exp(logs, out=logits)
            # Masked logits would give 0 * -inf. In place, since a separate product would be as large again.
            entropy = -logs.clamp_min_(-1e4).mul_(probabilities).sum(dim=-1)
            made.append((logprobs, entropy))
            kept = probabilities if len(targets) <= chunk and form.cap is None else None
            del logits, logs, probabilities  # before the next chunk's are made
        logprobs, entropy = (torch.cat(parts) for parts in zip(*made, strict=True))
        ctx.chunk, ctx.kept_tokens, ctx.form = chunk, kept_tokens, form
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, kept, entropy, others, inner, outer)
        ctx.set_materialize_grads(False)  # most losses ask nothing of the entropy
        mass = torch.cat(masses) if masses else None
        if mass is not None:
            ctx.mark_non_differentiable(mass)
        return logprobs, entropy, torch.cat(further) if further else None, torch.cat(beyond) if beyond else None, mass

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, of_entropy: Tensor | None, of_others: Tensor | None, of_outside: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        hidden, weight, bias, targets, temperature, kept, entropy, others, inner, outer = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad, inner, outer)
        for begin in range(0, len(targets), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            p, rest, slope = kept, None, None
            if p is None or of_outside is not None:
                logits, slope = _logits(
                    hidden[part], weight, bias, temperature, part, ctx.form, inner, outer, slope=True
                )
                if ctx.kept_tokens is not None and (cut := ctx.kept_tokens.outside(part, len(weight))) is not None:
                    logits.masked_fill_(cut, -torch.inf)
                    del cut
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
            if slope is not None:
                logits *= slope
            gradients.add(part, logits.to(hidden.dtype))
            del p, logits, extra, rest, slope
        return *gradients.of_inputs(), None, None, None, None, None, None, *gradients.of_adapter


class _InOnePass(torch.autograd.Function):
    """Like _TokenLogprobs without `others`, by Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from atropos_trainer_grpo import logprob_kernels as kernels

        chunk = rows_at_once(chunk, len(weight), hidden.device.type, one_pass=True)
        made = []
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            made.append(kernels.scored(logits, targets[part], None if temperature is None else temperature[part]))
            del logits
        logprobs, entropy, normaliser = (torch.cat(parts, dim=-1) for parts in zip(*made, strict=True))
        ctx.chunk = chunk
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropy, normaliser)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        from atropos_trainer_grpo import logprob_kernels as kernels

        hidden, weight, bias, targets, temperature, entropy, normaliser = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for begin in range(0, len(targets), ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            by, back, extra = (None if given is None else given[part] for given in (temperature, grad, of_entropy))
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            kernels.turn_into_gradient(
                logits, targets[part], by, normaliser[:, part].contiguous(), entropy[part], back, extra
            )
            gradients.add(part, logits)
            del logits
        return *gradients.of_inputs(), None, None, None


class _Gradients:
    """The gradients of the head's inputs and parameters, from those of the logits, chunk by chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        inner: Tensor | None = None,
        outer: Tensor | None = None,
    ) -> None:
        self._given = hidden, weight, inner, outer
        self._hidden = torch.empty_like(hidden)
        # Add directly to the gradient of earlier micro-batches, if there is one, so that the largest gradient does not exist twice.
        self._present = weight.grad if wanted[1] and weight.is_leaf else None
        self._weight = torch.zeros_like(weight) if self._present is None and wanted[1] else self._present
        self._bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        self.of_adapter = tuple(None if one is None else torch.zeros_like(one) for one in (inner, outer))

    def add(self, part: slice, logits: Tensor) -> None:
        """Add the part of these rows. `logits` [r, V] is the gradient of their logits, in the model's dtype."""
        hidden, weight, inner, outer = self._given
        torch.mm(logits, weight, out=self._hidden[part])
        if self._weight is not None:
            self._weight.addmm_(logits.t(), hidden[part])
        if self._bias is not None:
            self._bias += logits.sum(dim=0)
        of_inner, of_outer = self.of_adapter
        if inner is not None and outer is not None and of_inner is not None and of_outer is not None:
            torch.mm(logits, outer, out=of_inner[part])
            of_outer.addmm_(logits.t(), inner[part])

    def of_inputs(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._hidden, self._weight if self._present is None else None, self._bias


# torch leaves apply untyped
by_torch: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]] = _TokenLogprobs.apply
by_kernels: Callable[..., tuple[Tensor, Tensor]] = _InOnePass.apply


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | None,
    part: slice,
    form: LogitForm,
    inner: Tensor | None,
    outer: Tensor | None,
    *,
    slope: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logits by temperature, and with `slope`, their derivative by the head's output, before the temperature; None if it is 1."""
    logits, steep = torch.nn.functional.linear(hidden, weight, bias), None
    if inner is not None and outer is not None:
        logits.addmm_(inner[part], outer.t())
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if form.cap is not None:
        logits.mul_(form.scale / form.cap).tanh_()
        steep = torch.addcmul(logits.new_tensor(form.scale), logits, logits, value=-form.scale) if slope else None
        logits.mul_(form.cap)
    return logits if temperature is None else logits.div_(temperature[part, None].to(logits.dtype)), steep
