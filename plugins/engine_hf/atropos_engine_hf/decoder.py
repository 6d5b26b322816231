"""Run the model's forward passes. A decoder holds what the model remembers of the rows of the running batch.

There are two: `SlotDecoder` here, for models that remember exactly all keys and values, and `CohortDecoder` in cohort.py, for all
others. decode_path.py says which one a model takes.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_core.types import Tokens
from atropos_engine_hf.cache import SlotCache
from atropos_engine_hf.experts import Numbers, RouterRecorder
from atropos_engine_hf.transfers import upload

Logits = torch.Tensor  # [rows, V]


def chunks(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Split sequences into passes, shortest first. A padded pass has at most `most` tokens, or one sequence."""
    made: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not made or (len(made[-1]) + 1) * lengths[index] > most:
            made.append([])
        made[-1].append(index)
    return made


def some_logits(model: Any, last: int) -> dict[str, Any]:
    """Return the argument that asks for the logits of the last positions only, if the model takes it."""
    return {"logits_to_keep": last} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


class Decoder(ABC):
    """The model, and what it remembers of rows in slots 0, 1, .... The caller keeps track of the rows' owners."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.resumes = False  # True if a pass over several tokens can continue from what is stored
        self.routers: RouterRecorder | None = None  # set to record experts
        # Of the last call, [T, L, k]: of each prompt's tokens, or of one token of each slot.
        self.experts: list[Numbers] = []

    @abstractmethod
    def prefill(self, prompts: Sequence[Tokens], copies: Sequence[int], first: int) -> Logits:
        """Fill slots from `first` on: `copies[0]` of them with the first prompt, and so on.

        Returns the logits after each slot's last token. The capacity must have been reserved."""

    @abstractmethod
    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        """Append `tokens[r]` to slot r, which holds `lengths[r]` tokens. Returns the logits after it."""

    @abstractmethod
    def move(self, to: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Move slot r, which holds `lengths[r]` tokens, to slot `to[r]`, or drop it if that is -1. No slot is free between others
        afterwards."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all rows. Their memory may be kept for the next ones."""

    @abstractmethod
    def reserve(self, slots: int, columns: int) -> None:
        """Make room for this many rows of so many tokens."""

    @abstractmethod
    def bytes_for(self, slots: int, columns: int, *, kept: bool) -> int:
        """Return the bytes of rows of this number and length; with `kept`, at least what is allocated."""

    @property
    @abstractmethod
    def capacity(self) -> tuple[int, int] | None:
        """Allocated slots and columns, or None."""

    @abstractmethod
    def release(self) -> None:
        """Drop all rows and free their memory."""

    @abstractmethod
    def measure(self) -> None:
        """Learn from the rows present how many bytes a row takes."""

    @abstractmethod
    def another(self) -> Decoder:
        """Return a decoder of the same model that knows what this one has measured, and has no rows."""

    def put(self, values: NDArray[Any]) -> torch.Tensor:
        return upload(values, self.device)


class SlotDecoder(Decoder):
    """Rows in the slots of a SlotCache: only for models whose layers all have full attention."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.bytes_per_token = 0
        self.resumes = True
        self.cache = SlotCache(model.config.get_text_config(decoder=True).num_hidden_layers, model.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Tokens], copies: Sequence[int], first: int) -> Logits:
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), lengths.max()), dtype=np.int64)  # on the right: causal attention needs no mask
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        source = self.put(np.repeat(np.arange(len(prompts)), copies))
        last = self.put(lengths - 1)
        self.cache.enter(first, source, (last + 1)[source])
        keep, column = np.unique(lengths - 1, return_inverse=True)
        logits = self._forward(self.put(padded), logits_to_keep=self.put(keep))
        if self.routers is not None:
            chosen = self.routers.taken(len(prompts))
            self.experts = [row[:length] for row, length in zip(chosen, lengths, strict=True)]
        at = self.put(column) if logits.shape[1] == len(keep) else last
        return logits[torch.arange(len(prompts), device=self.device), at][source]

    @torch.inference_mode()
    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Logits:
        logits = self.decode_on_device(self.put(tokens), self.put(lengths), int(lengths.max()) + 1)
        if self.routers is not None:
            self.experts = list(self.routers.taken(len(tokens)))
        return logits

    def decode_on_device(self, tokens: torch.Tensor, lengths: torch.Tensor, columns: int) -> Logits:
        """Like `decode`, without a look at a value: each row is compared with the first `columns` columns of its slot."""
        mask = self.cache.advance(lengths, columns)
        return self._forward(tokens[:, None], attention_mask=mask, position_ids=lengths[:, None])[:, -1]

    @torch.inference_mode()
    def move(self, to: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        source = np.flatnonzero((to >= 0) & (to != np.arange(len(to))))
        if len(source):
            self.cache.move(self.put(source), self.put(to[source]), int(lengths[source].max()))

    def forget(self) -> None:
        """Do nothing: a row that enters a slot overwrites it."""

    @torch.inference_mode()
    def reserve(self, slots: int, columns: int) -> None:
        self.cache.reserve(slots, columns)

    def bytes_for(self, slots: int, columns: int, *, kept: bool) -> int:
        slots, columns = self.cache.capacity(slots, columns, kept=kept)
        return slots * columns * self.bytes_per_token

    @property
    def capacity(self) -> tuple[int, int] | None:
        place = self.cache.place
        return (place.slots, place.columns) if place.slots else None

    def release(self) -> None:
        self.cache.release()

    def measure(self) -> None:
        self.bytes_per_token = self.cache.bytes_per_token
        if any(not layer.is_initialized for layer in self.cache.slot_layers):
            raise ValueError("not every layer stored keys and values")

    def another(self) -> SlotDecoder:
        made = SlotDecoder(self.model)
        made.bytes_per_token, made.routers = self.bytes_per_token, self.routers
        return made

    def _forward(
        self, input_ids: torch.Tensor, *, logits_to_keep: torch.Tensor | None = None, **arguments: Any
    ) -> torch.Tensor:
        if logits_to_keep is not None and "logits_to_keep" in self.takes:
            arguments["logits_to_keep"] = logits_to_keep
        if self.routers is not None:
            self.routers.start()
        logits: torch.Tensor = self.model(
            input_ids=input_ids, past_key_values=self.cache, use_cache=True, **arguments
        ).logits
        return logits
