"""The probe: fixed tokens whose logprobs show that the policy has moved, and how far, also between two of the last versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core.health.alignment import MOVED, moved_column
from atropos_core.interfaces import Trainer
from atropos_core.types import UNKNOWN_VERSION, Batch, Bools, Floats, ScoredGroup, Tokens

PROBE_TOKENS = 256
WHOLE_TOKENS = (
    1024  # of their sequences, prompts included: many short replies to long prompts would cost more than an update
)


class Probe:
    """Up to 256 sampled tokens of the first batch, in sequences of up to 1,024 tokens in all or a single longer one, and the logprobs
    that they had before it was trained."""

    def __init__(self, sequences: list[Tokens], sampled: list[Bools], start: list[Floats]) -> None:
        self._sequences = sequences
        self._sampled = sampled
        self._start = start
        self._at: dict[int, Floats] = {}  # by version, of the sampled tokens: the last ones

    @classmethod
    async def of(cls, batch: Batch, trainer: Trainer) -> Probe:
        """Make the probe, before `batch` is trained."""
        sequences: list[Tokens] = []
        chosen: list[Bools] = []
        left, whole = PROBE_TOKENS, 0
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            if sequences and whole + int(end - start) > WHOLE_TOKENS:
                break
            sampled = batch.sampled[start:end].copy()
            sampled[np.flatnonzero(sampled)[left:]] = False
            sequences.append(batch.tokens[start:end])
            chosen.append(sampled)
            left -= int(sampled.sum())
            whole += int(end - start)
            if left <= 0:
                break
        probe = cls(sequences, chosen, await trainer.logprobs(sequences))
        probe._at[batch.version - 1] = probe._sampled_of(probe._start)
        return probe

    async def shift(self, trainer: Trainer, version: int | None = None, keep: int = 0) -> float:
        """Return the largest |logprob now - logprob at the start| over the probe's tokens, in nats. With `version`, the trainer's
        present one, remember the logprobs, and keep those of the `keep` versions before it."""
        now = await trainer.logprobs(self._sequences)
        if version is not None:
            self._at[version] = self._sampled_of(now)
            self._at = {one: values for one, values in self._at.items() if version - keep <= one <= version}
        shifts = [
            np.abs(after - before)[sampled].max(initial=0.0)
            for after, before, sampled in zip(now, self._start, self._sampled, strict=True)
        ]
        return float(np.max(shifts))  # not max(): a NaN must show, wherever it stands

    def moved(self, since: int, version: int) -> float | None:
        """Return the largest change of a logprob between two remembered versions, in nats. With `since` UNKNOWN_VERSION, compare with
        the remembered version, or the start, that is farthest. None if a version is not remembered."""
        now = self._at.get(version)
        if now is None:
            return None
        if since == UNKNOWN_VERSION:
            before = [self._sampled_of(self._start), *self._at.values()]
        elif since in self._at:
            before = [self._at[since]]
        else:
            return None
        return float(np.max([np.abs(now - then).max(initial=0.0) for then in before]))

    def with_movement(self, batch: Batch, groups: Sequence[ScoredGroup]) -> Batch:
        """Add how far the policy has moved since each sequence was sampled, if it is known."""
        now, moved = batch.version - 1, []
        for rollout in (rollout for group in groups for one in group.episodes for rollout in one.rollouts):
            each = [self.moved(int(one), now) for one in np.unique(rollout.policy_version[rollout.sampled])]
            known = [nats for nats in each if nats is not None]
            moved.append(max(known, default=0.0) if len(known) == len(each) else None)
        return replace(batch, columns={**batch.columns, MOVED: moved_column(moved)})

    def _sampled_of(self, each: Sequence[Floats]) -> Floats:
        return np.concatenate([values[chosen] for values, chosen in zip(each, self._sampled, strict=True)])

    def state(self) -> Mapping[str, Any]:
        return {
            "sequences": [ids.tolist() for ids in self._sequences],
            "sampled": [np.flatnonzero(sampled).tolist() for sampled in self._sampled],
            "start": [values.tolist() for values in self._start],
            "at": [[version, values.tolist()] for version, values in self._at.items()],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Probe:
        """Restore a probe. Raises KeyError, TypeError, ValueError."""
        sequences = [np.array(ids, np.int32) for ids in state["sequences"]]
        sampled = []
        for ids, at in zip(sequences, state["sampled"], strict=True):
            mask = np.zeros(len(ids), bool)
            mask[at] = True
            sampled.append(mask)
        start = [np.array(values, np.float32) for values in state["start"]]
        if [one.shape for one in start] != [one.shape for one in sequences]:
            raise ValueError("the probe has other numbers of logprobs than of tokens")
        probe = cls(sequences, sampled, start)
        probe._at = {int(version): np.array(values, np.float32) for version, values in state.get("at", ())}
        if any(one.shape != (sum(map(sum, sampled)),) for one in probe._at.values()):
            raise ValueError("the probe has other numbers of logprobs than of sampled tokens")
        return probe
