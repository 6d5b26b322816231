"""The action "rollback" of the check reward_hacking: to which checkpoint a run goes back, and which weight the gamed reward gets.

A rollback is first recorded as a line of rollbacks.jsonl that is not done (`RollbackPlanner.record`). `launch/rolling_back.py` then
does it, also if the process was killed in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from atropos_core.config.run_file import RunConfig
from atropos_core.errors import CheckpointError
from atropos_core.health.check import Change
from atropos_core.storage.atomic import unwritable, write_whole
from atropos_core.storage.checkpoint import Checkpoint, Checkpoints
from atropos_core.storage.run_records import ROLLBACKS, Rollback, rollbacks


class RollbackPlanner:
    """`directory` is the run's own, and `checkpoints` are its checkpoints."""

    def __init__(self, config: RunConfig, directory: Path, checkpoints: Checkpoints) -> None:
        self._config = config
        self._directory = directory
        self._checkpoints = checkpoints

    def plan(self, change: Change) -> Rollback | str:
        """Return the rollback for a finding, or why there cannot be one, as a clause."""
        options, weights = self._config.health.reward_hacking, self._config.reward_weights()
        if len(rollbacks(self._directory)) >= options.rollbacks:
            return f"all of its rollbacks are used (health.reward_hacking.rollbacks = {options.rollbacks})"
        if not change.blames:
            return "the finding does not say which reward is gamed"
        if not weights.get(change.blames):
            return f"the weight of the gamed reward {change.blames!r} is 0 already"
        if not any(weight for name, weight in weights.items() if name != change.blames):
            return f"the gamed reward {change.blames!r} is the only one that is trained on"
        if (checkpoint := self._clean(change.since)) is None:
            there = ", ".join(map(str, self._checkpoints.steps())) or "none"
            return (
                f"no whole checkpoint from before step {change.since} is left (checkpoints are of the steps: {there})"
            )
        before = weights[change.blames]
        weight = before * options.rollback_weight
        return Rollback(change.step, change.since, checkpoint.step, change.blames, before, weight, change.says)

    def record(self, rollback: Rollback) -> None:
        """Write that this rollback has begun. Raises RunDirectoryError."""
        write_rollbacks(self._directory, [*rollbacks(self._directory), rollback])

    def _clean(self, since: int) -> Checkpoint | None:
        """Return the newest whole checkpoint of a step before `since` in which the check was ok."""
        for step in reversed(self._checkpoints.steps()):
            if step >= since:
                continue
            try:
                checkpoint = self._checkpoints.at(step)
            except CheckpointError:
                continue
            if checkpoint.state["health"]["checks"]["reward_hacking"]["state"] == "ok":
                return checkpoint
        return None


def write_rollbacks(directory: Path, rows: Sequence[Rollback]) -> None:
    """Write rollbacks.jsonl as a whole. Raises RunDirectoryError."""
    path = directory / ROLLBACKS
    try:
        write_whole(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    except OSError as error:
        raise unwritable(path, error) from error
