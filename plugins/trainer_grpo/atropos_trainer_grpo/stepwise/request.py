"""The sequences of one call: checked once, then cut into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.stepwise import TargetSequence
from atropos_core.types import Floats, Tokens
from atropos_trainer_grpo.packed_rows import microbatches
from atropos_trainer_grpo.padded_rows import row_microbatches
from atropos_trainer_grpo.prefix_tree import Indices
from atropos_trainer_grpo.stepwise.losses import CLIP, LOSSES, SumLoss


@dataclass(frozen=True)
class Part:
    """Whole sequences for one forward pass, end to end. All have the same number of targets at a position."""

    sequences: Indices  # their numbers in the call
    lengths: Indices
    tokens: Tokens  # [N]
    targets: NDArray[np.int64]  # [N] or [N, K]
    values: Mapping[str, Floats]  # in the shape of `targets`


@dataclass(frozen=True)
class Request:
    """A call of `forward_backward` that fits its loss and the model."""

    sequences: Sequence[TargetSequence]
    loss: SumLoss
    settings: Mapping[str, float]

    def parts(self, limit: int, *, padded: bool, share: bool) -> Iterator[Part]:
        """Yield the micro-batches of at most `limit` tokens: `padded` with one sequence to a row, else packed."""
        widths = [sequence.targets.shape[1:] for sequence in self.sequences]
        for width in sorted(set(widths)):
            alike = np.flatnonzero([one == width for one in widths])
            chosen = [self.sequences[number] for number in alike.tolist()]
            lengths = np.array([len(one.tokens) for one in chosen], dtype=np.int64)
            order = np.arange(len(alike))
            if padded:
                cut = row_microbatches(lengths, order, limit)
            elif share:
                tokens = np.concatenate([one.tokens for one in chosen]).astype(np.int32)
                cut = microbatches(lengths, order, limit, tokens, np.zeros(len(alike), np.int32))
            else:
                cut = microbatches(lengths, order, limit)
            yield from (self._part(alike[run], lengths[run]) for run in cut)

    def _part(self, numbers: Indices, lengths: Indices) -> Part:
        chosen = [self.sequences[number] for number in numbers.tolist()]
        return Part(
            sequences=numbers,
            lengths=lengths,
            tokens=np.concatenate([one.tokens for one in chosen]).astype(np.int32),
            targets=np.concatenate([one.targets for one in chosen]).astype(np.int64),
            values={
                name: np.concatenate([one.values[name] for one in chosen]).astype(np.float32)
                for name in chosen[0].values
            },
        )


def checked(
    sequences: Sequence[TargetSequence],
    loss: str,
    settings: Mapping[str, float],
    *,
    vocabulary: int,
    longest: int | None,
) -> Request:
    """Return the call as a Request. Raises DataError, which names the sequence, if something does not fit."""
    known = LOSSES.get(loss)
    if known is None:
        raise DataError(f"no loss is called {loss!r:.100}.", remedy=f"Choose one of: {', '.join(LOSSES)}.")
    for name, number in settings.items():
        if name not in known.settings:
            raise DataError(f"the loss {loss!r} has no setting {name!r:.100}.", remedy=_choice(known.settings))
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise DataError(f"the setting {name} of the loss {loss!r} is {number!r:.100}: it must be a finite number.")
    if not sequences:
        raise DataError("a call without sequences is refused.")
    by_token = set(CLIP) & set(known.settings)  # settings that may also be given for each token
    names = set(sequences[0].values)
    for place, sequence in enumerate(sequences):
        where = f"sequence {place} of {len(sequences)}"
        _check_tokens(where, "tokens", sequence.tokens, vocabulary)
        if sequence.tokens.ndim != 1 or not len(sequence.tokens):
            raise DataError(f"{where} has tokens of shape {list(sequence.tokens.shape)}: it needs at least one, [N].")
        if longest is not None and len(sequence.tokens) > longest:
            raise DataError(f"{where} has {len(sequence.tokens)} tokens, and the model's context holds {longest}.")
        _check_tokens(where, "targets", sequence.targets, vocabulary)
        _check_shape(where, sequence, known, loss)
        if missing := [name for name in known.needs if name not in sequence.values]:
            raise DataError(f"{where} has no {missing[0]}, which the loss {loss!r} needs for each target.")
        if unknown := sorted(sequence.values.keys() - {*known.needs, *by_token}):
            raise DataError(
                f"{where} has {unknown[0]!r:.100}, which the loss {loss!r} does not use.",
                remedy=_choice([*known.needs, *sorted(by_token)]),
            )
        if sequence.values.keys() != names:
            raise DataError(f"{where} has other values than sequence 0: {sorted(sequence.values)} and {sorted(names)}.")
        for name, values in sequence.values.items():
            _check_values(where, name, values, sequence.targets.shape)
        if "sequence_ratio_mask" in known.needs and not sequence.values["sequence_ratio_mask"].any():
            raise DataError(f"{where} has a sequence_ratio_mask of zeros: its ratio is a mean over no token.")
    return Request(sequences, known, {**known.settings, **settings})


def _check_tokens(where: str, name: str, ids: object, vocabulary: int) -> None:
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        raise DataError(f"{where} has {name} that are not an array of whole numbers.")
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(f"{where} has the id {wrong} in its {name}, and the model's ids are 0 to {vocabulary - 1}.")


def _check_shape(where: str, sequence: TargetSequence, loss: SumLoss, name: str) -> None:
    shape, length = sequence.targets.shape, len(sequence.tokens)
    if not 1 <= len(shape) <= 2 or shape[0] != length or 0 in shape:
        raise DataError(f"{where} has targets of shape {list(shape)} for {length} tokens: [N] or [N, K] is expected.")
    if len(shape) == 2 and not loss.several:
        raise DataError(
            f"{where} has {shape[1]} targets at each position, and the loss {name!r} takes one.",
            remedy="Give targets of shape [N], or choose cross_entropy.",
        )


def _check_values(where: str, name: str, values: object, shape: tuple[int, ...]) -> None:
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiub":
        raise DataError(f"{where} has {name} that are not an array of numbers.")
    if values.shape != shape:
        raise DataError(f"{where} has {name} of shape {list(values.shape)} for targets of shape {list(shape)}.")
    if not np.isfinite(values).all():
        raise DataError(f"{where} has {name} that are not all finite numbers.")


def _choice(names: Mapping[str, float] | Sequence[str]) -> str:
    return f"Choose from: {', '.join(names)}." if names else "It has none."
