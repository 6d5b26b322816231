"""The protobuf bodies that the server answers with: the output of forward_backward, and samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Floats
from atropos_tinker_api.wire.protobuf import content, double, integer, packed
from atropos_tinker_api.wire.tensors import FLOAT32

STOP, LENGTH = 0, 1  # StopReason
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # cells of a TopkLogprobs without a value


def forward_backward_output(logprobs: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput. `logprobs`: [N] or [N, K] per sequence."""
    parts = [content(1, "ArrayRecord")]
    for _, run in groupby(logprobs, key=lambda one: one.shape[1:]):  # the arrays of one record have one trailing shape
        parts.append(content(2, _record(list(run))))
    parts += [content(3, content(1, name) + double(2, value)) for name, value in metrics.items()]
    return b"".join(parts)


def _record(arrays: Sequence[Floats]) -> bytes:
    data = [np.ascontiguousarray(one, "<f4").tobytes() for one in arrays]
    offsets = np.cumsum([0, *map(len, data)]).astype("<i8")
    shape = arrays[0].shape[1:]
    tensor = content(1, b"".join(data)) + content(2, offsets.tobytes()) + integer(3, FLOAT32)
    tensor += packed(4, shape) if shape else b""
    entry = content(1, "logprobs") + content(2, tensor)
    return content(1, "ArrayRecord") + content(2, entry) + integer(3, len(arrays))


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each of T positions; empty cells have NO_TOKEN and NO_LOGPROB."""

    ids: NDArray[np.int32]  # [T, k]
    logprobs: Floats  # [T, k]

    def message(self) -> bytes:
        length, k = self.ids.shape
        out = content(1, self.ids.astype("<i4").tobytes()) + content(2, self.logprobs.astype("<f4").tobytes())
        return out + integer(3, k) + integer(4, length)


@dataclass(frozen=True)
class Sample:
    """One sampled sequence."""

    tokens: NDArray[np.int32]
    logprobs: Floats
    stopped: bool  # not cut off at max_tokens
    top: TopLogprobs | None = None


def sample_response(
    samples: Sequence[Sample], prompt_logprobs: Floats | None = None, prompt_top: TopLogprobs | None = None
) -> bytes:
    """Return a SampleResponse. `prompt_logprobs` has NaN at positions that were not scored."""
    parts = [content(1, b"".join(_sequence(one))) for one in samples]
    if prompt_logprobs is not None:
        parts.append(content(2, prompt_logprobs.astype("<f4").tobytes()))
    if prompt_top is not None:
        parts.append(content(3, prompt_top.message()))
    return b"".join(parts)


def _sequence(sample: Sample) -> Iterator[bytes]:
    yield integer(1, STOP if sample.stopped else LENGTH)
    yield content(2, sample.tokens.astype("<i4").tobytes())
    yield content(3, sample.logprobs.astype("<f4").tobytes())
    if sample.top is not None:
        yield content(4, sample.top.message())
