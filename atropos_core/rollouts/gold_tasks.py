"""Which tasks the gold reward scores: a fixed share of them, the same in every run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from atropos_core.config.component import GoldOptions
from atropos_core.types import Draw, Task


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
        if draw.split != "train":
            return False
        digest = hashlib.blake2b(f"{draw.environment}\0{task.id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) < self.share * 2**64

    def holds_back(self, draw: Draw, task: Task) -> bool:
        """True if the rollouts of this draw must not be trained."""
        return self.hold_back and self.has(draw, task)
