"""Which tasks the gold reward scores: a fixed share of them, the same in every run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from atropos_core.config.component import GoldOptions
from atropos_core.errors import FitError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.prompt_lengths import spread
from atropos_core.types import Draw, Task

MOST_LOOKED_AT = 2000  # tasks of an environment
ENOUGH = 8  # that are expected among those which are looked at


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
        return draw.split == "train" and place(draw.environment, task.id) < self.share

    def holds_back(self, draw: Draw, task: Task) -> bool:
        """True if the rollouts of this draw must not be trained."""
        return self.hold_back and self.has(draw, task)

    def check(self, reward: str, environments: Mapping[str, Environment]) -> None:
        """Raises FitError if the share is such that none of the training tasks is scored, or none is left to train."""
        tasks = {name: environment.tasks("train") for name, environment in environments.items()}
        wanted = min(MOST_LOOKED_AT, math.ceil(ENOUGH / self.share))
        places = [
            place(name, of[number].id)
            for name, of in tasks.items()
            for number in islice(spread(len(of)), min(wanted, len(of)))
        ]
        every, share = sum(len(of) for of in tasks.values()), f"reward.{reward}.gold.share = {self.share:g}"
        if len(places) < every or not places:  # only a part of many tasks
            return
        if min(places) >= self.share:
            raise FitError(
                f"{share} gives the gold reward none of the {every} training tasks, so nothing would be compared.",
                remedy=f"Raise it to {math.ceil(1000 * min(places) + 1) / 1000:g} or more, or add tasks.",
            )
        if self.hold_back and max(places) < self.share:
            raise FitError(
                f"{share} holds back all of the {every} training tasks, so nothing would be trained.",
                remedy="Lower it, add tasks, or train them all the same: hold_back = false.",
            )


def place(environment: str, task: str) -> float:
    """Return the place of a task among all tasks, from 0 to 1: a share below it does not choose the task."""
    digest = hashlib.blake2b(f"{environment}\0{task}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
