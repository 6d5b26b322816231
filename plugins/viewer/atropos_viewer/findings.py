"""The findings of the run's health checks, as spans of steps to mark on a curve."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from atropos_core.config.health_options import HealthSection
from atropos_core.health.checks import checks
from atropos_core.storage.run_records import HealthChange, Rollback


def findings(changes: Iterable[HealthChange], rollbacks: Iterable[Rollback] = ()) -> list[dict[str, Any]]:
    """One finding for each time that a check became ill (`ill`) or looks wrong now (`suspect`), oldest first. `until` is None
    while it lasts. A run that ended with an error has one finding of the check `run`. Each rollback has one that comes first: its steps
    were run again, so that health.jsonl no longer has the finding that caused it."""
    metrics_of = _metrics_of()
    found: list[dict[str, Any]] = [
        {
            "check": "reward_hacking", "since": one.since, "until": one.step, "metrics": list(metrics_of["reward_hacking"]),
            "state": "ill", "says": one.says, "do": f"{one}",
        }
        for one in rollbacks
    ]  # fmt: skip
    going: dict[str, dict[str, Any]] = {}
    for change in changes:
        if change.state == "ok":
            before = going.pop(change.check, None)
            if before is not None:
                before["until"] = max(change.since - 1, before["since"])
                if before["state"] == "suspect":  # it came to nothing
                    found.remove(before)
            continue
        if change.check not in going:
            metrics = list(metrics_of.get(change.check, ()))
            going[change.check] = {"check": change.check, "since": change.since, "until": None, "metrics": metrics}
            found.append(going[change.check])
        going[change.check] |= {"state": change.state, "says": change.says, "do": change.remedy}
    return found


@cache
def _metrics_of() -> dict[str, tuple[str, ...]]:
    return {check.name: check.needs for check in checks(HealthSection())}
