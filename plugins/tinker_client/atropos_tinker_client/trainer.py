"""The trainer `tinker`: a server computes gradients and takes optimizer steps. One step of a run is one optimizer step there."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atropos_core.errors import CheckpointError, DataError, TrainingDiverged
from atropos_core.health.alignment import compare
from atropos_core.interfaces import ModelInfo, Trainer, Writing
from atropos_core.types import Batch, Floats, Metrics, Tokens
from atropos_tinker_client.losses import form_of, gspo, trained_tokens, weights_of
from atropos_tinker_client.service import OPEN_S, WORK_S, Service, answer, described

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_tinker_client.config import TinkerTrainerOptions

STATE = "tinker.json"  # of a checkpoint: the path of the state at the server


class TinkerTrainer(Trainer):
    """A bridge's extension finds `client` here, the training client of the present adapter."""

    client: Any  # tinker.TrainingClient, Any because the package is optional

    def __init__(self, options: TinkerTrainerOptions, context: RunContext) -> None:
        self._options = options
        self._context = context
        self._form = form_of(options)
        self._service: Service | None = None
        self._token_values: Mapping[str, Floats] = {}

    async def open(self) -> ModelInfo:
        """Begin a session, and make an adapter that does not change the model yet."""
        options = self._options
        self._service = await Service.open("trainer")
        self.client = await answer(
            "a new adapter",
            self._service.session.create_lora_training_client(
                base_model=self._service.model(options.base_model, "trainer"),
                rank=options.rank,
                seed=self._context.seed,
                train_attn=options.train_attention,
                train_mlp=options.train_mlp,
                train_unembed=options.train_head,
            ),
            OPEN_S,
        )
        return described(self._context.model, options.dtype)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        check_batch(batch)
        trained = trained_tokens(batch)
        weights = weights_of(batch, self._form.average, self._options.loss_length)
        new, old, loss = await self._backward(batch, weights * batch.advantages)
        if not math.isfinite(loss):
            raise TrainingDiverged(f"batch {batch.version}: the Tinker server's loss is {loss:g}.")
        async with writing():
            done = await answer("an optimizer step", self.client.optim_step(self._adam()), WORK_S)
        claimed = batch.sampled & np.repeat(batch.has_logprobs, batch.lengths)
        claimed[batch.offsets[:-1]] = False
        self._token_values = {
            "advantages": batch.advantages,
            "trainer_logprobs": np.where(trained | claimed, new, np.float32(np.nan)),
        }
        ratio = np.exp(np.minimum(new - old, 60.0))[trained]
        norm = {name.partition(":")[0]: value for name, value in (done.metrics or {}).items()}
        return {
            "loss": loss,
            "learning_rate": self._options.learning_rate,
            "ratio/mean": float(ratio.mean()) if len(ratio) else 1.0,
            "tokens": float(trained.sum()),
            **({"grad_norm": float(norm["grad_norm"])} if "grad_norm" in norm else {}),
            **compare(batch, new, claimed, claimed),
        }

    async def token_values(self) -> Mapping[str, Floats]:
        return self._token_values

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        if temperature not in (0.0, 1.0):
            raise NotImplementedError(
                f"a Tinker server trains at temperature 1, and logprobs at temperature {temperature:g} were requested"
            )
        zeros = [np.zeros(len(sequence), np.float32) for sequence in sequences]
        made, _ = await self._send("cross_entropy", sequences, {"weights": zeros}, backward=False)
        return made

    async def save(self, directory: Path) -> None:
        """Have the server save adapter and optimizer, and write down under which path."""
        saved = await answer("a checkpoint", self.client.save_state(f"atropos-{uuid.uuid4().hex[:12]}"), WORK_S)
        (directory / STATE).write_text(json.dumps({"path": saved.path}) + "\n", encoding="utf-8")

    async def restore(self, directory: Path) -> None:
        """Continue from the state that the server has saved. Raises CheckpointError if the checkpoint names none."""
        try:
            path = str(json.loads((directory / STATE).read_text(encoding="utf-8"))["path"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory} names no state that the Tinker server has saved: {error}",
                remedy="Resume a run of `--trainer tinker`, from another of its checkpoints.",
            ) from error
        assert self._service is not None, "open() comes before restore()"
        restoring = self._service.session.create_training_client_from_state_with_optimizer(path)
        self.client = await answer(f"the state {path}", restoring, OPEN_S)

    async def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            await service.close()

    def _adam(self) -> Any:
        import tinker

        options = self._options
        return tinker.AdamParams(
            learning_rate=options.learning_rate,
            beta1=options.betas[0],
            beta2=options.betas[1],
            eps=options.eps,
            weight_decay=options.weight_decay,
            grad_clip_norm=options.max_grad_norm,
        )

    async def _backward(self, batch: Batch, factors: Floats) -> tuple[Floats, Floats, float]:
        """Add up the gradient at the server. Return the logprobs [N] of the policy, those that ratios compare with, and the loss.

        `factors` [N] are the advantages times each token's weight in the average."""
        form, trained, custom = self._form, trained_tokens(batch), self._options.loss == "gspo"
        known = np.repeat(batch.has_logprobs, batch.lengths)
        old = batch.logprobs
        if custom or (trained & ~known).any():
            before = np.concatenate(await self.logprobs(_split(batch, batch.tokens)))
            old = np.where(known, old, before)
        if custom:
            loss, gradient = gspo(batch, before, old, factors, form)
            columns = {"weights": -gradient.astype(np.float32)}
        elif form.sent_as == "cross_entropy":
            columns = {"weights": factors}
        else:
            columns = {"logprobs": np.where(trained, old, np.float32(0)), "advantages": factors}
        split = {name: _split(batch, column) for name, column in columns.items()}
        made, sent = await self._send(form.sent_as, _split(batch, batch.tokens), split, backward=True)
        return np.concatenate(made), old, loss if custom else sent

    async def _send(
        self, loss: str, sequences: Sequence[Tokens], columns: Mapping[str, Sequence[Floats]], *, backward: bool
    ) -> tuple[list[Floats], float]:
        """Return logprobs f32[T] for each sequence, with entry 0 = 0, and the loss. Columns have a value for each token."""
        import tinker

        form = self._form
        bounds = {"clip_low_threshold": 1 - form.low, "clip_high_threshold": 1 + form.high}
        longer = [at for at, sequence in enumerate(sequences) if len(sequence) > 1]
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(sequences[at][:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": sequences[at][1:].astype(np.int64),
                    **{name: column[at][1:].astype(np.float32) for name, column in columns.items()},
                },
            )
            for at in longer
        ]
        logprobs = [np.zeros(len(sequence), np.float32) for sequence in sequences]
        if not data:
            return logprobs, 0.0
        call = self.client.forward_backward if backward else self.client.forward
        config = bounds if loss in ("ppo", "cispo") else None
        output = await answer("a forward pass", call(data, loss, config), WORK_S)
        for at, found in zip(longer, output.loss_fn_outputs, strict=True):
            logprobs[at][1:] = found["logprobs"].to_numpy()
        return logprobs, float(output.metrics.get("loss:sum", math.nan))


def _split(batch: Batch, column: Any) -> list[Any]:
    return np.split(column, batch.offsets[1:-1])


def check_batch(batch: Batch) -> None:
    """Raises DataError for a batch that a Tinker server cannot train on."""
    if not np.isfinite(batch.advantages).all():
        raise DataError("the batch has an advantage that is not a finite number")
    if (heat := batch.temperature[(batch.temperature > 0) & (batch.temperature != 1)]).size:
        raise DataError(
            f"a sequence was sampled at temperature {heat[0]:g}, and a Tinker server computes ratios at temperature 1 only.",
            remedy="Set sampling.temperature = 1.",
        )
    if batch.truncated.any() or batch.kept_sizes.any():
        raise DataError(
            "a sequence was sampled with top_p, top_k or min_p, and a Tinker server computes ratios over the whole vocabulary only.",
            remedy="Set sampling.top_p = 1, top_k = 0 and min_p = 0.",
        )
    supervised = batch.columns.get("sft")
    if supervised is not None and supervised.values.any():
        raise DataError("a sequence is marked as supervised data (sft), which trainer 'tinker' has no loss for.")
