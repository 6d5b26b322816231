"""The body of `forward_backward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_tinker_api.wire import protobuf
from atropos_tinker_api.wire.tensors import Array, read_tensor

MOST_DATUMS = 1 << 14  # of one request; a client sends 1,024 at a time
MOST_CHUNKS = 1 << 12
MOST_NAMES = 64
MOST_ELEMENTS = 1 << 25  # of all tensors of a request, when they are dense
_CHUNKS = {2: "an image", 3: "audio (dmel)"}


@dataclass(frozen=True)
class Datum:
    """One sequence, as it was sent: `inputs` has target_tokens, weights and so on."""

    tokens: NDArray[np.int32]
    inputs: Mapping[str, Array]


@dataclass(frozen=True)
class ForwardBackward:
    """One request. `forward_only`: no gradient."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    settings: Mapping[str, float]
    forward_only: bool


def addressed(body: bytes) -> tuple[str, int]:
    """Return the model and the sequence id of a request without reading its data. Raises DataError."""
    model, seq = "", 0
    for field in protobuf.fields(memoryview(body)):
        if field.tag == 1:
            model = field.text()
        elif field.tag == 2:
            seq = field.integer()
    return model, seq


def is_forward_only(body: bytes) -> bool:
    """Return False also for a body that cannot be read."""
    try:
        return any(field.tag == 6 and field.integer() != 0 for field in protobuf.fields(memoryview(body)))
    except DataError:
        return False


def read_request(body: bytes) -> ForwardBackward:
    """Read a request. Raises DataError for what is malformed or too much, and names what is not supported."""
    model, seq, loss, forward_only = "", 0, "", False
    data: list[Datum] = []
    settings: dict[str, float] = {}
    elements = 0
    for field in protobuf.fields(memoryview(body)):
        if field.tag == 1:
            model = field.text()
        elif field.tag == 2:
            seq = field.integer()
        elif field.tag == 3:
            data.append(_datum(field.content(), len(data)))
            elements += sum(one.size for one in data[-1].inputs.values())
            if len(data) > MOST_DATUMS:
                raise DataError(f"the request has more than {MOST_DATUMS:,} sequences.", remedy="Send fewer at once.")
            if elements > MOST_ELEMENTS:
                raise DataError(
                    f"the tensors of the request have more than {MOST_ELEMENTS:,} elements.",
                    remedy="Send fewer sequences at once, or fewer targets per position.",
                )
        elif field.tag == 4:
            loss = field.text()
        elif field.tag == 6:
            forward_only = bool(field.integer())
        elif field.tag == 7:  # 5 has the same numbers, for servers that do not know 7
            name, value = _entry(field.content())
            settings[name] = _setting(name, value)
            if len(settings) > MOST_NAMES:
                raise DataError(f"loss_fn_config has more than {MOST_NAMES} names.")
    return ForwardBackward(model, seq, data, loss, settings, forward_only)


def _datum(data: memoryview, index: int) -> Datum:
    tokens: list[NDArray[np.int32]] = []
    inputs: dict[str, Array] = {}
    for field in protobuf.fields(data):
        if field.tag == 1:
            tokens.append(_chunk(field.content(), index))
            if len(tokens) > MOST_CHUNKS:
                raise DataError(f"sequence {index} has more than {MOST_CHUNKS:,} chunks.")
        elif field.tag == 2:
            name, value = _entry(field.content())
            inputs[name] = read_tensor(value, f"{name!r} of sequence {index}")
            if len(inputs) > MOST_NAMES:
                raise DataError(f"sequence {index} has more than {MOST_NAMES} tensors.")
    return Datum(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs)


def _chunk(data: memoryview, index: int) -> NDArray[np.int32]:
    for field in protobuf.fields(data):
        if field.tag in _CHUNKS:
            raise DataError(
                f"sequence {index} has {_CHUNKS[field.tag]}, and this server trains only text.",
                remedy="Send token ids.",
            )
        if field.tag == 1:
            for inner in protobuf.fields(field.content()):
                if inner.tag == 1:
                    held = inner.content()
                    if len(held) % 4:
                        raise DataError(f"the tokens of sequence {index} are not int32.")
                    return np.frombuffer(held, "<i4").astype(np.int32)
    return np.zeros(0, np.int32)


def _entry(data: memoryview) -> tuple[str, memoryview]:
    """Return key and value of an entry of a map whose values are messages."""
    key, value = "", data[:0]
    for field in protobuf.fields(data):
        if field.tag == 1:
            key = field.text(256)
        elif field.tag == 2:
            value = field.content()
    return key, value


def _setting(name: str, data: memoryview) -> float:
    """Return a value of loss_fn_config."""
    for field in protobuf.fields(data):
        if field.tag == 1:
            return field.double()
        if field.tag == 2:
            raise DataError(f"loss_fn_config {name!r} is a text, and no loss of this server takes one.")
    return 0.0
