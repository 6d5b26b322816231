"""Run the model's forward passes: prefill slots of the cache, and decode one token of every slot."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_core.errors import FitError
from atropos_core.types import Tokens
from atropos_engine_hf.cache import SlotCache

Logits = torch.Tensor  # [rows, V]


def chunks(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Split sequences into passes, shortest first. A padded pass has at most `most` tokens, or one sequence."""
    made: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not made or (len(made[-1]) + 1) * lengths[index] > most:
            made.append([])
        made[-1].append(index)
    return made


class Decoder:
    """The model and the keys and values of rows in slots 0, 1, .... The caller keeps track of the rows' owners."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.bytes_per_token = 0
        self._some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.cache = SlotCache(model.config.get_text_config(decoder=True).num_hidden_layers, model.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Tokens], copies: Sequence[int], first: int) -> Logits:
        """Fill slots from `first` on: `copies[0]` of them with the first prompt, and so on.

        Returns the logits after each slot's last token. The capacity must have been reserved."""
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), lengths.max()), dtype=np.int64)  # on the right: causal attention needs no mask
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        source = self._put(np.repeat(np.arange(len(prompts)), copies))
        last = self._put(lengths - 1)
        self.cache.enter(first, source, (last + 1)[source])
        keep, column = np.unique(lengths - 1, return_inverse=True)
        logits = self._forward(self._put(padded), logits_to_keep=self._put(keep))
        at = self._put(column) if logits.shape[1] == len(keep) else last
        return logits[torch.arange(len(prompts), device=self.device), at][source]

    @torch.inference_mode()
    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        """Append `tokens[r]` to slot r, which holds `lengths[r]` tokens. Returns the logits after it."""
        position = self._put(lengths)
        mask = self.cache.advance(position, int(lengths.max()) + 1)
        logits = self._forward(self._put(tokens)[:, None], attention_mask=mask, position_ids=position[:, None])
        return logits[:, -1]

    @torch.inference_mode()
    def move(self, source: NDArray[np.int64], target: NDArray[np.int64], columns: int) -> None:
        self.cache.move(self._put(source), self._put(target), columns)

    @torch.inference_mode()
    def reserve(self, slots: int, columns: int) -> None:
        self.cache.reserve(slots, columns)

    def bytes_for(self, slots: int, columns: int, *, kept: bool) -> int:
        """Return the bytes of keys and values for this size; with `kept`, at least the present size."""
        slots, columns = self.cache.capacity(slots, columns, kept=kept)
        return slots * columns * self.bytes_per_token

    @property
    def capacity(self) -> tuple[int, int] | None:
        """Allocated slots and columns, or None."""
        place = self.cache.place
        return (place.slots, place.columns) if place.slots else None

    def release(self) -> None:
        """Free the memory of keys and values."""
        self.cache.release()

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the decoding of a few tokens with the model's plain forward pass. Raises FitError if they differ.

        They differ if the model keeps more than keys and values, or ignores positions or masks. Its samples would then come
        from another distribution."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        known = np.random.default_rng(0).integers(0, vocabulary, (2, 7))
        lengths = np.array([2, 5])
        self.reserve(2, 7)
        try:
            ours = [self.prefill([row[:n] for row, n in zip(known, lengths, strict=True)], [1, 1], 0)]
            for step in range(2):
                ours.append(self.decode(known[[0, 1], lengths + step], lengths + step))
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise FitError(f"{_NO_CACHE.format(self.model.config.model_type)}: {error}", remedy=_REMEDY) from error
        self.bytes_per_token = self.cache.bytes_per_token
        if any(not layer.is_initialized for layer in self.cache.slot_layers):
            raise FitError(
                f"{_NO_CACHE.format(self.model.config.model_type)}: not every layer stored any.", remedy=_REMEDY
            )
        whole = self.model(input_ids=self._put(known), use_cache=False).logits.float()
        for step, logits in enumerate(ours):
            expected = whole[[0, 1], lengths + step - 1]
            off = float(
                (logits.float() - expected).norm()
                / (expected - expected.mean(-1, keepdim=True)).norm().clamp_min(1e-12)
            )
            if not off < (1e-3 if self.model.dtype == torch.float32 else 0.1):
                raise FitError(
                    f"{_NO_CACHE.format(self.model.config.model_type)}: logits of a decode step differ from a plain"
                    f" forward pass by {off:.2%} of their spread.",
                    remedy=_REMEDY,
                )
        self.release()

    def _forward(
        self, input_ids: torch.Tensor, *, logits_to_keep: torch.Tensor | None = None, **arguments: Any
    ) -> torch.Tensor:
        if logits_to_keep is not None and self._some_logits:
            arguments["logits_to_keep"] = logits_to_keep
        logits: torch.Tensor = self.model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True, **arguments
        ).logits
        return logits

    def _put(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


_NO_CACHE = "engine 'hf' cannot decode a {!r} model through a plain cache of keys and values"
_REMEDY = "Use `--engine vllm` for this model."
