"""A number for each task, known before the first draw, turned into quantile bins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import ConfigError, DataError
from atropos_core.types import Task
from atropos_curriculum.config import Prior

Numbers = NDArray[np.float64]


def inner_edges(values: Numbers, bins: int) -> Numbers:
    """The values at which one bin ends and the next begins: numpy.quantile at 1/bins, 2/bins, .... Each edge occurs once, so tasks
    with the same value are in one bin, and there may be fewer bins than requested."""
    return np.unique(np.quantile(values, np.arange(1, bins) / bins))


def bins_of(values: Numbers, edges: Numbers) -> NDArray[np.uint8]:
    """Bin 0 is the lowest. A value on an edge belongs to the bin that ends there."""
    return np.searchsorted(edges, values, side="left").astype(np.uint8)


def success_of_bins(values: Numbers, edges: Numbers, meaning: str) -> Numbers:
    """The success to expect of each bin before any draw. If the values are rates, it is their mean. Otherwise it falls evenly from
    the easiest bin to the hardest, a guess that the first outcomes correct."""
    count = len(edges) + 1
    if meaning == "difficulty":
        return 1 - (np.arange(count) + 0.5) / count
    bins = bins_of(values, edges)
    overall = float(values.mean())
    return np.array([values[bins == at].mean() if (bins == at).any() else overall for at in range(count)])


def from_file(prior: Prior, environment: str, size: int) -> NDArray[Any]:
    """One number for each task. Raises ConfigError if the file cannot be read, DataError if it does not fit."""
    assert prior.file is not None, "the options say so"
    path = Path(prior.file.format(environment=environment))
    try:
        if path.suffix == ".npy":
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with path.open() as lines:
                values = np.fromiter((float(line) for line in lines if line.strip()), np.float64)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"curriculum.prior.file = {prior.file!r}: {path} cannot be read as one number for each task: {error}",
            remedy="Give a .npy file of numbers, or text with a number per line, in the order of the tasks.",
        ) from error
    if values.shape != (size,):
        raise DataError(
            f"curriculum.prior.file: {path} has shape {values.shape}, and environment {environment!r} has {size} training tasks.",
            remedy="Give one number for each task, in their order.",
        )
    return np.asanyarray(_checked(values, prior, f"{path}"))


def from_field(prior: Prior, environment: str, tasks: Sequence[Task] | None, indices: NDArray[np.int64]) -> Numbers:
    """The field of only these tasks. Raises ConfigError if there is none."""
    if tasks is None:
        raise ConfigError(
            f"curriculum.prior.field = {prior.field!r}: the tasks of environment {environment!r} are not in this process.",
            remedy="Workers elsewhere run its rollouts: give the numbers as curriculum.prior.file.",
        )
    values = np.empty(len(indices))
    for at, index in enumerate(indices):
        task = tasks[int(index)]
        try:
            values[at] = float(task.data[str(prior.field)])
        except (KeyError, TypeError, ValueError) as error:
            has = ", ".join(sorted(task.data)) or "no data"
            raise ConfigError(
                f"curriculum.prior.field = {prior.field!r} is not a number in task {task.id!r} of environment {environment!r}, "
                f"which has {has}: {type(error).__name__}: {error}",
                remedy="Name a field that every task has, or give the numbers as curriculum.prior.file.",
            ) from error
    return np.asarray(_checked(values, prior, f"field {prior.field!r} of {environment!r}"))


def spread(size: int, start: int, count: int) -> NDArray[np.int64]:
    """Entries `start` to `start + count` of an order of all tasks in which any stretch is spread evenly over them: steps
    of the golden section, made coprime to the size."""
    stride = max(int(size * 0.6180339887498949), 1)
    while np.gcd(stride, size) != 1:
        stride += 1
    return (np.arange(start, min(start + count, size), dtype=np.int64) * stride) % size


def _checked(values: Any, prior: Prior, where: str) -> Any:
    low, high = float(np.min(values)), float(np.max(values))  # NaN comes through both
    if not (np.isfinite(low) and np.isfinite(high)):
        raise DataError(f"curriculum.prior: {where} has a number that is not finite.")
    if prior.meaning == "success" and (low < 0 or high > 1):
        raise DataError(
            f"curriculum.prior: {where} goes from {low:g} to {high:g}, and success rates are from 0 to 1.",
            remedy='With higher meaning harder, say meaning = "difficulty".',
        )
    return values
