"""The content of a shared segment, and the check that it is exactly what a model needs. Plain values, without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_core.errors import WeightsMismatch

PAGE = 4096  # the segment's first page holds sentinels, never weights
ALIGN = 64

SAME_MODEL = "Trainer and engine must open the same model directory with the same dtype (trainer.dtype, engine.dtype)."
CORRUPT = "This is a fault of the program, not of the run: please report it with both lines above."


@dataclass(frozen=True)
class Tensor:
    """One distinct parameter or persistent buffer. Tied names are its aliases."""

    name: str
    aliases: tuple[str, ...]
    dtype: str  # "float32"
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    offset: int = 0  # bytes from the start of the segment
    nbytes: int = 0

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        return (1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))) * self.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @classmethod
    def decoded(cls, value: Mapping[str, Any]) -> Tensor:
        return cls(**{**value, **{key: tuple(value[key]) for key in ("aliases", "shape", "stride")}})

    def __str__(self) -> str:
        tied = f", tied to {', '.join(self.aliases)}" if self.aliases else ""
        return f"{self.dtype} {list(self.shape)} stride {list(self.stride)}{tied}"


@dataclass(frozen=True)
class Manifest:
    """Everything that the engine's segment holds."""

    size: int  # bytes of the segment
    tensors: tuple[Tensor, ...]
    rebuilt: Mapping[str, str]  # of non-persistent buffers, which do not travel: name -> digest of dtype, shape, bytes

    def encoded(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def decoded(cls, value: Mapping[str, Any]) -> Manifest:
        return cls(value["size"], tuple(Tensor.decoded(entry) for entry in value["tensors"]), dict(value["rebuilt"]))


def place(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Place the tensors one after another behind the sentinel page, each at a multiple of ALIGN."""
    placed, offset = [], PAGE
    for tensor in tensors:
        placed.append(dataclasses.replace(tensor, offset=offset, nbytes=tensor.span_bytes))
        offset += -(-tensor.span_bytes // ALIGN) * ALIGN
    return tuple(placed)


def end(tensors: Sequence[Tensor]) -> int:
    """Bytes of a segment that holds them, in whole pages."""
    last = max((tensor.offset + tensor.nbytes for tensor in tensors), default=PAGE)
    return -(-last // PAGE) * PAGE


def check(offered: Manifest, wanted: Sequence[Tensor], mapped_bytes: int) -> None:
    """Raise WeightsMismatch unless `offered` is a valid segment that holds exactly the tensors of `wanted` and no others.
    Nothing is converted, filled or left out."""
    _check_segment(offered, mapped_bytes)
    theirs = {name: tensor for tensor in offered.tensors for name in tensor.names}
    ours = {name: tensor for tensor in wanted for name in tensor.names}
    if missing := sorted(ours.keys() - theirs.keys()):
        raise WeightsMismatch(
            f"the trainer's model has {_some(missing)} ({ours[missing[0]]}), and the engine's has no such tensor.",
            remedy=SAME_MODEL,
        )
    if extra := sorted(theirs.keys() - ours.keys()):
        raise WeightsMismatch(
            f"the engine's model has {_some(extra)} ({theirs[extra[0]]}), and the trainer's has no such tensor.",
            remedy=SAME_MODEL,
        )
    for tensor in wanted:
        other = theirs[tensor.name]
        if set(tensor.names) != set(other.names):
            raise WeightsMismatch(
                f"{tensor.name!r} is tied otherwise: the trainer's model has {_ties(tensor)}, the engine's has {_ties(other)}.",
                remedy="tie_word_embeddings must be the same in both models' config.json.",
            )
        for what in ("dtype", "shape", "stride"):
            if getattr(tensor, what) != getattr(other, what):
                raise WeightsMismatch(
                    f"{tensor.name!r}: {what} differs.\n  trainer: {tensor}\n  engine:  {other}", remedy=SAME_MODEL
                )


def _check_segment(offered: Manifest, mapped_bytes: int) -> None:
    if offered.size != mapped_bytes:
        raise WeightsMismatch(
            f"the manifest speaks of {offered.size} bytes, and the segment has {mapped_bytes}.", remedy=CORRUPT
        )
    free, before = PAGE, "the sentinel page"
    for tensor in sorted(offered.tensors, key=lambda tensor: tensor.offset):
        stretch = f"{tensor.name!r} at bytes {tensor.offset} to {tensor.offset + tensor.nbytes}"
        if len(tensor.shape) != len(tensor.stride) or min((*tensor.shape, *tensor.stride, 0)) < 0:
            raise WeightsMismatch(f"{tensor.name!r}: shape and stride do not belong together: {tensor}", remedy=CORRUPT)
        if tensor.nbytes != tensor.span_bytes or tensor.span_bytes != math.prod(tensor.shape) * tensor.itemsize:
            raise WeightsMismatch(
                f"{tensor.name!r}: {tensor} does not fill {tensor.nbytes} bytes without gaps.", remedy=CORRUPT
            )
        if tensor.offset % tensor.itemsize:
            raise WeightsMismatch(f"{stretch} is not aligned to {tensor.itemsize} bytes.", remedy=CORRUPT)
        if tensor.offset < free:
            raise WeightsMismatch(f"{stretch} overlaps {before}.", remedy=CORRUPT)
        if tensor.offset + tensor.nbytes > offered.size:
            raise WeightsMismatch(f"{stretch} ends outside the segment of {offered.size} bytes.", remedy=CORRUPT)
        free, before = tensor.offset + tensor.nbytes, repr(tensor.name)


def check_rebuilt(offered: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise WeightsMismatch unless the buffers that each side computes itself (rotary frequencies) agree bit for bit."""
    for name in sorted(offered.keys() | ours.keys()):
        if offered.get(name) != ours.get(name):
            raise WeightsMismatch(
                f"buffer {name!r}, which is not saved with the weights, differs between the two models:"
                f" trainer {ours.get(name, 'has none')}, engine {offered.get(name, 'has none')}.",
                remedy="Both sides must have the same versions of torch and transformers, and the same config.json.",
            )


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _ties(tensor: Tensor) -> str:
    return f"one parameter under {' and '.join(tensor.names)}" if tensor.aliases else f"{tensor.name} by itself"
