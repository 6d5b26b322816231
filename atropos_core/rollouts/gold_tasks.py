"""The tasks that the gold reward scores: a fixed share of them, the same in every run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from atropos_core.config.component import GoldOptions
from atropos_core.errors import FitError
from atropos_core.interfaces import Environment
from atropos_core.types import Draw, Task

MOST_TASKS = 2000  # all tasks are looked at, unless there are more than this,
ENOUGH = 8  # or more than this are expected to be chosen


@dataclass(frozen=True)
class GoldTasks:
    """The tasks of a gold reward. `has` looks only at a task's environment and id, so that a resumed run, a remote worker and another
    run of the same tasks choose the same ones."""

    share: float
    hold_back: bool = True

    @classmethod
    def of(cls, options: GoldOptions | None) -> GoldTasks | None:
        return None if options is None else cls(options.share, options.hold_back)

    def has(self, draw: Draw, task: Task) -> bool:
        """True if the gold reward scores the rollouts of this draw. Tasks of the test split are evaluated, not trained, and have none."""
        return draw.split == "train" and task_hash(draw.environment, task.id) < self.share

    def holds_back(self, draw: Draw, task: Task) -> bool:
        """True if the rollouts of this draw must not be trained."""
        return self.hold_back and self.has(draw, task)

    def check(self, reward: str, environments: Mapping[str, Environment]) -> None:
        """Raises FitError if the share is such that none of the training tasks is scored, or none is left to train."""
        tasks = {name: environment.tasks("train") for name, environment in environments.items()}
        every, share = sum(len(of) for of in tasks.values()), f"reward.{reward}.gold.share = {self.share:g}"
        if not 0 < every <= min(MOST_TASKS, ENOUGH / self.share):  # of so many, some are chosen and some are not
            return
        hashes = [task_hash(name, of[number].id) for name, of in tasks.items() for number in range(len(of))]
        if min(hashes) >= self.share:
            raise FitError(
                f"{share} gives the gold reward none of the {every} training tasks, so nothing would be compared.",
                remedy=f"Raise it to {math.ceil(1000 * min(hashes) + 1) / 1000:g} or more, or add tasks.",
            )
        if self.hold_back and max(hashes) < self.share:
            raise FitError(
                f"{share} holds back all of the {every} training tasks, so nothing would be trained.",
                remedy="Lower it, add tasks, or train them all the same: hold_back = false.",
            )


def task_hash(environment: str, task: str) -> float:
    """Return a number from 0 to 1, evenly distributed over tasks. A share above it chooses the task."""
    digest = hashlib.blake2b(f"{environment}\0{task}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
