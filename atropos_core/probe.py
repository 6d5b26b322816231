"""The probe: a fixed set of tokens whose logprobs show that, and how far, the policy has moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atropos_core.interfaces import Trainer
from atropos_core.types import Batch, Bools, Floats, Tokens

PROBE_TOKENS = 256


class Probe:
    """Up to 256 sampled tokens of the first batch, and the logprobs that they had before it was trained."""

    def __init__(self, sequences: list[Tokens], sampled: list[Bools], start: list[Floats]) -> None:
        self._sequences = sequences
        self._sampled = sampled
        self._start = start

    @classmethod
    async def of(cls, batch: Batch, trainer: Trainer) -> Probe:
        sequences: list[Tokens] = []
        chosen: list[Bools] = []
        left = PROBE_TOKENS
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            sampled = batch.sampled[start:end].copy()
            sampled[np.flatnonzero(sampled)[left:]] = False
            sequences.append(batch.tokens[start:end])
            chosen.append(sampled)
            left -= int(sampled.sum())
            if left <= 0:
                break
        return cls(sequences, chosen, await trainer.logprobs(sequences))

    async def shift(self, trainer: Trainer) -> float:
        """The largest |logprob now - logprob at the start| over the probe's tokens, in nats."""
        now = await trainer.logprobs(self._sequences)
        shifts = [
            np.abs(after - before)[sampled].max(initial=0.0)
            for after, before, sampled in zip(now, self._start, self._sampled, strict=True)
        ]
        return float(np.max(shifts))  # not max(): a NaN must show, wherever it stands

    def state(self) -> Mapping[str, Any]:
        return {
            "sequences": [ids.tolist() for ids in self._sequences],
            "sampled": [np.flatnonzero(sampled).tolist() for sampled in self._sampled],
            "start": [values.tolist() for values in self._start],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Probe:
        sequences = [np.array(ids, np.int32) for ids in state["sequences"]]
        sampled = []
        for ids, at in zip(sequences, state["sampled"], strict=True):
            mask = np.zeros(len(ids), bool)
            mask[at] = True
            sampled.append(mask)
        return cls(sequences, sampled, [np.array(values, np.float32) for values in state["start"]])
