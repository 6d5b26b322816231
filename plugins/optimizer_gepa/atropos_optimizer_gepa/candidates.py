"""Prompts that were tried, and from which of them the next one is made: GEPA's selection (arXiv 2507.19457, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Candidate:
    """A prompt, the mean reward of each task under it, and of its rollouts (task, reply, reward) those that proposers are shown."""

    prompt: str
    parent: int = -1
    scores: dict[str, float] = field(default_factory=dict)
    examples: list[tuple[str, str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, at: int, prompt: str, parent: int, scores: Mapping[str, float], examples: Iterable[Any]) -> Candidate:
        """Return the candidate with the number `at` of what was saved. Raises ValueError, TypeError and others for another form."""
        if not isinstance(prompt, str) or type(parent) is not int or not -1 <= parent < at:
            raise ValueError(f"candidate {at} has the prompt {prompt!r:.60} and the parent {parent!r:.60}")
        shown = [(str(task), str(reply), float(reward)) for task, reply, reward in examples]
        means = {task: float(score) for task, score in scores.items()}
        if not all(map(math.isfinite, (*means.values(), *(reward for *_, reward in shown)))):
            raise ValueError(f"candidate {at} has a score that is not a finite number")
        return cls(prompt, parent, means, shown)

    @property
    def mean(self) -> float:
        """The mean over the tasks that it was tried on, or -inf if there are none yet."""
        return float(np.mean(list(self.scores.values()))) if self.scores else -math.inf


def table(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    """Return mean rewards [C, T], -inf for a prompt that was not tried on a task."""
    tasks = sorted({task for one in candidates for task in one.scores})
    rows = [[one.scores.get(task, -np.inf) for task in tasks] for one in candidates]
    return np.array(rows).reshape(len(candidates), -1)


def frequencies(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """[C] how likely each is the next parent: in proportion to the tasks [C, T] on which none was rewarded better. 0 for one all of
    whose tasks another one that is left does as well."""
    leads = scores >= scores.max(axis=0, initial=-np.inf) - 1e-9
    left = leads.any(axis=1)
    for one in np.argsort(leads.sum(axis=1), kind="stable"):
        others = leads[left & (np.arange(len(leads)) != one)].any(axis=0)
        left[one] &= not (leads[one] <= others).all()
    counts = np.where(left, leads.sum(axis=1), 0).astype(np.float64)
    return counts / counts.sum() if counts.any() else np.full(len(scores), 1 / len(scores))


def best(candidates: Sequence[Candidate]) -> int:
    """Return the index of the highest mean over the tasks that each was tried on; the first of equal ones, and 0 if none was tried."""
    return int(np.argmax([one.mean for one in candidates]))
