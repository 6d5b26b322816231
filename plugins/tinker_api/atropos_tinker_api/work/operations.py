"""Training requests: how each is read, and what the trainer does for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from atropos_core.errors import DataError
from atropos_core.guards.worker_threads import LONG, apart
from atropos_core.stepwise import AdamSettings, StepwiseTrainer, TargetSequence
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import Model
from atropos_tinker_api.wire.answers import forward_backward_output
from atropos_tinker_api.wire.training_request import Datum, ForwardBackward, read_request

TARGETS = "target_tokens"
LARGEST = 1e30  # of a number that a client sends for training
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@dataclass(frozen=True)
class Limits:
    """The bounds of one sequence. `context`: its most tokens; 0 if the model does not say."""

    vocabulary: int
    context: int


async def forward_backward(
    trainer: StepwiseTrainer, model: Model, body: bytes, limits: Limits, *, gradient_only: bool = False
) -> bytes:
    """Carry out the request. `gradient_only`: its result is known, and only its gradient is needed again. Raises DataError."""
    request = await apart(read_request, body) if len(body) > LONG else read_request(body)
    if gradient_only and request.forward_only:
        return b""
    sequences = (
        await apart(target_sequences, request, limits) if len(body) > LONG else target_sequences(request, limits)
    )
    output = await trainer.forward_backward(
        model.id, sequences, request.loss, request.settings, not request.forward_only
    )
    return forward_backward_output(output.logprobs, {name: float(value) for name, value in output.metrics.items()})


def target_sequences(request: ForwardBackward, limits: Limits) -> list[TargetSequence]:
    """Return what the trainer gets. Raises DataError."""
    if not request.data:
        raise DataError("the request has no sequences.")
    if request.loss == "custom":
        raise DataError(
            "loss 'custom' is one that runs on the server, and this server has none.",
            remedy="Use forward_backward_custom with a function: it runs in your process.",
        )
    for name, value in request.settings.items():
        if not math.isfinite(value):
            raise DataError(f"loss_fn_config {name!r} is {value}.")
    return [_sequence(datum, index, request.loss, limits) for index, datum in enumerate(request.data)]


def _sequence(datum: Datum, index: int, loss: str, limits: Limits) -> TargetSequence:
    tokens, size = datum.tokens, len(datum.tokens)
    if not size:
        raise DataError(f"sequence {index} has no tokens.")
    if limits.context and size > limits.context:
        raise DataError(f"sequence {index} has {size} tokens, and the model's context is {limits.context}.")
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        raise DataError(f"sequence {index} has a token id outside 0 to {limits.vocabulary - 1}.")
    targets = datum.inputs.get(TARGETS)
    if targets is None:
        raise DataError(f"sequence {index} has no {TARGETS}.")
    if targets.dtype.kind != "i" or targets.shape[:1] != (size,):
        raise DataError(
            f"{TARGETS} of sequence {index} has the shape {list(targets.shape)} and the dtype {targets.dtype.name}.",
            remedy=f"It is int64, with one row for each of the {size} tokens of model_input.",
        )
    if targets.size and (targets.min() < 0 or targets.max() >= limits.vocabulary):
        raise DataError(f"{TARGETS} of sequence {index} has a token id outside 0 to {limits.vocabulary - 1}.")
    values = {
        name: _values(name, value, index, targets.shape) for name, value in datum.inputs.items() if name != TARGETS
    }
    if loss == "cross_entropy" and "weights" not in values:
        values["weights"] = np.ones(targets.shape, np.float32)
    return TargetSequence(tokens, targets.astype(np.int64), values)


def _values(name: str, value: np.ndarray[Any, Any], index: int, shape: tuple[int, ...]) -> Any:
    if value.shape != shape:
        raise DataError(
            f"{name!r} of sequence {index} has the shape {list(value.shape)}, and {TARGETS} has {list(shape)}."
        )
    value = value.astype(np.float32)
    if not (np.abs(value) <= LARGEST).all():
        raise DataError(f"{name!r} of sequence {index} has a value that is not a number up to {LARGEST:g}.")
    return value


async def optim_step(trainer: StepwiseTrainer, model: Model, body: bytes) -> Mapping[str, Any]:
    """Carry out the request. Raises DataError."""
    metrics = await trainer.optimizer_step(model.id, adam_settings(body))
    return {"metrics": {name: float(value) for name, value in metrics.items()}, "type": "optim_step"}


def adam_settings(body: bytes) -> AdamSettings:
    """Read adam_params. Raises DataError."""
    whole = Fields(orjson.loads(body))
    if whole.has("optimizer_params"):
        kind = whole.fields("optimizer_params").text("type", "")
        raise DataError(f"the optimizer {kind[:50]!r} is not one of this server's.", remedy="Use AdamParams.")
    given = whole.fields("adam_params")
    given.only(*ADAM)
    values = {name: given.number(name, default) for name, default in ADAM.items()}
    for name, value in values.items():
        most = 1.0 if name in ("beta1", "beta2") else LARGEST
        if not 0 <= value <= most or (most == 1.0 and value == 1.0):
            raise DataError(f"adam_params.{name} cannot be {value:g}.")
    clip = values.pop("grad_clip_norm")
    return AdamSettings(**values, max_grad_norm=clip)


async def carry_out_again(trainer: StepwiseTrainer, model: Model, since: int, limits: Limits) -> None:
    """Bring an adapter from the saved state of request `since` to its last state: its gradient, and its steps after that state."""
    for _, kind, body, succeeded in model.carried_out_since(since):
        if kind == Kind.FORWARD_BACKWARD and succeeded:
            await forward_backward(trainer, model, body, limits, gradient_only=True)
        elif kind == Kind.OPTIM_STEP and succeeded:
            await optim_step(trainer, model, body)
        elif kind == Kind.OPTIM_STEP:
            await trainer.clear_gradient(model.id)
