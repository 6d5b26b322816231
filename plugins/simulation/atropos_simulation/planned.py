"""Simulate a planned run in a dry run, if its processes may be on several machines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENGINES = (1, 8, 64, 512)


def lines(plan: Any, figures: Path | None) -> Iterable[str]:
    """Simulate the plan with its own and other numbers of engines. Without figures, say which option provides them."""
    if not plan.spans_machines:
        return
    if figures is None:
        yield (
            "what more engines would bring, and what saturates first: --figures with the directory of a run that has ended, or a TOML "
            "file"
        )
        return
    from atropos_core import console
    from atropos_simulation import report
    from atropos_simulation.command import known_from
    from atropos_simulation.figures import Known
    from atropos_simulation.loop_model import ClusterSize

    training = plan.config.training
    names = ("groups_per_step", "group_size", "max_staleness", "refill_rounds")
    shape = {f"run.{name}": getattr(training, name) for name in names}
    known = known_from(*((figures, None) if figures.is_dir() else (None, figures)))
    given = Known(shape, dict.fromkeys(shape, "this run's own"), {}).over(known).figures()
    many = sorted({*ENGINES, len(plan.engines)})
    made = list(report.rows(given, [ClusterSize(one) for one in many]))
    here = f"{len(plan.engines)} engine{'s' * (len(plan.engines) > 1)}"
    yield f"simulated with the figures of {figures}, and training.* of this run, which has {here}:"
    console.table(report.COLUMNS, [row.cells for row in made])
    yield from report.conclusions(given, made)
