"""All adapters of clients on one base model. The trainer's own adapter is the active one whenever no call is in progress."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from peft import LoraConfig, PeftModel

from atropos_core.errors import CheckpointError, DataError, TrainingDiverged
from atropos_core.stepwise import AdamSettings, AdapterSettings, StepwiseOutput, TargetSequence
from atropos_core.storage.checkpoint import AS_WRITTEN
from atropos_core.types import Floats, Metrics
from atropos_trainer_grpo import lora
from atropos_trainer_grpo.attention import attention_of, window_of
from atropos_trainer_grpo.forward_passes import distinct_rows
from atropos_trainer_grpo.model import language_model, lay_out_tokens, layout_of_model, score, vocabulary_of
from atropos_trainer_grpo.stepwise import files
from atropos_trainer_grpo.stepwise.adapter import Adapter
from atropos_trainer_grpo.stepwise.layers import MOST_RANK, lora_config
from atropos_trainer_grpo.stepwise.losses import TargetRows
from atropos_trainer_grpo.stepwise.request import Part, Request, checked

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


class Adapters:
    """Calls on adapters by their clients' names. A call that raises has changed nothing."""

    def __init__(self, model: PeftModel, options: GrpoOptions, device: str) -> None:
        self._model = model
        self._options = options
        self._device = device
        self._by_name: dict[str, Adapter] = {}
        self._made = 0
        config = language_model(model).config
        self._is_padded = layout_of_model(model).name == "rows"
        self._attention = "" if self._is_padded else attention_of(options.attention, config, device)
        self._window = window_of(config)
        self._vocabulary = vocabulary_of(model)
        self._longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)

    def create(self, name: str, settings: AdapterSettings) -> None:
        if name in self._by_name:
            raise DataError(
                f"there is already an adapter {name!r:.100}.", remedy="Drop it first, or choose another name."
            )
        _check(settings)
        self._by_name[name] = self._add(lora_config(self._model, settings), settings.seed)

    def drop(self, name: str) -> None:
        self._delete(self._find(name))
        del self._by_name[name]

    def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        adapter = self._find(name)
        request = checked(sequences, loss, settings, vocabulary=self._vocabulary, longest=self._longest)
        logprobs: list[Floats] = [np.zeros(0, np.float32)] * len(sequences)
        parts: list[tuple[Part, torch.Tensor]] = []
        losses: list[torch.Tensor] = []
        with self._active(adapter), torch.set_grad_enabled(backward):
            for part in request.parts(
                self._options.tokens_per_microbatch, padded=self._is_padded, share=self._options.share_prompts
            ):
                scored = self._scored(part)
                values = request.loss.of(self._rows(request, part, scored))
                if backward:
                    values.sum().backward()
                losses.append(values.detach().double().sum())
                parts.append((part, scored.detach()))
            gradient = adapter.take_gradient() if backward else []
        total = float(torch.stack(losses).sum())
        if not math.isfinite(total):
            raise TrainingDiverged(
                f"the loss of this call is {total:g}.",
                remedy="Give smaller weights, advantages or logprobs; or restore the adapter from a state before its weights grew.",
            )
        if backward:
            adapter.add(gradient)
        for part, scored in parts:
            each = np.split(scored.float().cpu().numpy(), np.cumsum(part.lengths)[:-1])
            for number, found in zip(part.sequences.tolist(), each, strict=True):
                logprobs[number] = found
        return StepwiseOutput(logprobs, {"loss:sum": total})

    def step(self, name: str, adam: AdamSettings) -> Metrics:
        return self._find(name).step(adam)

    def clear_gradient(self, name: str) -> None:
        self._find(name).clear_gradient()

    def save(self, directory: Path, name: str, *, moments: bool) -> None:
        files.write(self._model, self._find(name), directory, moments=moments)

    def restore(self, directory: Path, name: str, *, moments: bool) -> None:
        saved = files.read(directory, moments=moments)
        try:
            made = self._add(saved.config, 0)
        except ValueError as error:
            raise CheckpointError(
                f"the adapter in {directory} does not fit the model: {str(error).splitlines()[0]}", remedy=AS_WRITTEN
            ) from error
        try:
            files.load(made, saved, directory)
        except CheckpointError:
            self._delete(made)
            raise
        before = self._by_name.get(name)
        self._by_name[name] = made
        if before is not None:
            self._delete(before)

    def _find(self, name: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            raise DataError(f"an adapter {name!r:.100} does not exist.", remedy="Create it, or restore it, first.")
        return adapter

    def _add(self, config: LoraConfig, seed: int) -> Adapter:
        """Add an adapter whose first weights follow from `seed` only. Raises ValueError if its layers are not the model's."""
        self._made += 1
        key = f"client{self._made:09d}"  # peft looks for names inside names: none contains another
        config.base_model_name_or_path = self._model.peft_config[lora.NAME].base_model_name_or_path
        with torch.random.fork_rng(devices=[self._device] if self._device.startswith("cuda") else []):
            torch.manual_seed(seed)
            self._model.add_adapter(key, config)
        lora.compute_in_inputs_dtype(self._model)
        self._model.set_adapter(lora.NAME)
        named = {name: one for name, one in self._model.named_parameters() if f".{key}." in name}
        return Adapter(key, {name.replace(f".{key}.", "."): one for name, one in named.items()})

    def _delete(self, adapter: Adapter) -> None:
        self._model.delete_adapter(adapter.key)
        self._model.set_adapter(lora.NAME)

    @contextmanager
    def _active(self, adapter: Adapter) -> Iterator[None]:
        self._model.set_adapter(adapter.key)
        try:
            yield
        finally:
            adapter.leave_gradient()
            self._model.set_adapter(lora.NAME)

    def _scored(self, part: Part) -> torch.Tensor:
        """Return the logprobs of a micro-batch's targets, in their shape."""
        padded = self._attention == "auto" and part.lengths.max() > self._window
        packing = lay_out_tokens(
            self._model,
            part.tokens,
            part.lengths,
            self._device,
            share=self._options.share_prompts,
            attention="padded" if padded else self._attention,
        )
        targets = torch.from_numpy(part.targets).to(self._device)
        chunk = self._options.logprob_chunk
        if part.targets.ndim == 2:
            places = packing.at(np.arange(len(part.tokens)))
            several = score(self._model, packing, places, targets[:, 0], None, chunk, targets).others
            assert several is not None, "these are the other tokens that were requested"
            return several
        alike = packing.slots * self._vocabulary + part.targets  # one target at one place of a shared beginning
        once, of = distinct_rows(alike, np.ones(len(alike), np.float32), worth=True)
        rows = np.arange(len(alike))[once]
        single = score(self._model, packing, packing.at(rows), targets[torch.from_numpy(rows)], None, chunk).logprobs
        return single if of is None else single.index_select(0, torch.from_numpy(of).to(self._device))

    def _rows(self, request: Request, part: Part, logprobs: torch.Tensor) -> TargetRows:
        values = {name: torch.from_numpy(one).to(self._device) for name, one in part.values.items()}
        sequence = torch.from_numpy(np.repeat(np.arange(len(part.lengths)), part.lengths)).to(self._device)
        return TargetRows(logprobs, sequence, values, request.settings)


def _check(settings: AdapterSettings) -> None:
    rank, alpha, seed = settings.rank, settings.alpha, settings.seed
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise DataError(f"the rank of an adapter is {rank!r:.100}: it must be 1 to {MOST_RANK}.")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
        raise DataError(f"the alpha of an adapter is {alpha!r:.100}: it must be a number above 0.")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise DataError(f"the seed of an adapter is {seed!r:.100}: it must be a whole number from 0 to 2^63 - 1.")
