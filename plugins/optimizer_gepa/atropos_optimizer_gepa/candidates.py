"""Prompts that were tried, and the choice of the next one's parent: GEPA's selection (arXiv 2507.19457, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Candidate:
    """A prompt, each task's mean reward with it, and the rollouts (task, reply, reward) that proposers are shown."""

    prompt: str
    parent: int = -1
    scores: dict[str, float] = field(default_factory=dict)
    examples: list[tuple[str, str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, at: int, prompt: str, parent: int, scores: Mapping[str, float], examples: Iterable[Any]) -> Candidate:
        """Make the saved candidate number `at`. Raises ValueError, TypeError and others if its form is wrong."""
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
    """Return how likely each prompt is to be the next parent [C]: in proportion to the number of tasks [C, T] that it leads, on which
    no prompt was rewarded better. 0 for a prompt if the remaining prompts also lead all of its tasks."""
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
