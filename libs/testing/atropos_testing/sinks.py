"""The contract of a sink: it accepts every kind of step, changes nothing, and continues correctly after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from atropos_core.codec import encode_bytes
from atropos_core.interfaces import Stateful
from atropos_core.types import Metrics, ScoredGroup
from atropos_testing.replies import ADVERSARIAL
from atropos_testing.samples import make_episode, make_group, make_groups, make_task
from atropos_testing.stages import StagedContract

EVALUATED: Metrics = {"eval/accuracy": 0.25, "eval/reward": 0.5, "eval/problems": 4.0}


class SinkContract(StagedContract):
    """Checks one sink on made-up steps."""

    stages = {  # noqa: RUF012 - ClassVar of the base
        "steps": (
            "the evaluation before training, then steps with groups and without",
            "Step 0 has only the metrics of the evaluation, and no groups; a step may have none.",
        ),
        "odd metrics": (
            "new names, and numbers that are not finite",
            "A metric may be missing, be new, or be infinite or NaN: record what is there.",
        ),
        "hostile replies": (
            "replies with control characters and half surrogates",
            'A reply is any text: escape it, or encode it with errors="backslashreplace".',
        ),
        "groups unchanged": ("the groups given are as they were", "Groups are shared with other sinks: copy what you change."),
        "resumes": (
            "a new instance loads the state, and continues",
            "state() gives JSON values. load() comes before open(), which cuts back what was recorded after that state: right "
            "after it, state() gives the same.",
        ),
    }  # fmt: skip

    async def check_steps(self) -> Sequence[str]:
        await self.made.step(0, EVALUATED, [])
        await self.made.step(1, _metrics(1), make_groups())
        await self.made.step(2, _metrics(2), [])
        return []

    async def check_odd_metrics(self) -> Sequence[str]:
        odd = {"new": 1.0, "a name/of its own, with ünïcode": 2.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
        await self.made.step(3, _metrics(3) | odd, make_groups())
        return []

    async def check_hostile_replies(self) -> Sequence[str]:
        await self.made.step(4, _metrics(4), [_hostile_group(40)])
        return []

    async def check_groups_unchanged(self) -> Sequence[str]:
        groups, metrics = make_groups(50), _metrics(5)
        before = [encode_bytes(group) for group in groups]
        await self.made.step(5, metrics, groups)
        wrong = [] if metrics == _metrics(5) else ["the metrics given were changed"]
        changed = [i for i, group in enumerate(groups) if encode_bytes(group) != before[i]]
        return [*wrong, *(f"group {i} was changed in place" for i in changed)]

    async def check_resumes(self) -> Sequence[str]:
        """Steps after the state are lost with the run that died, and are repeated."""
        died: Any = self.made  # a Sink, and perhaps Stateful as well
        if not isinstance(died, Stateful):
            self.report.note("state", "it has none: what a run recorded after its last checkpoint stays as it is")
            return []
        saved = json.loads(json.dumps(died.state()))
        await self.made.step(6, _metrics(6), make_groups(60))
        await self.made.close()
        self.made = again = self.subject.make()
        again.load(saved)
        await again.open()
        now = json.loads(json.dumps(again.state()))
        await again.step(6, _metrics(6), make_groups(60))
        return (
            []
            if now == saved
            else [f"its state is {now!r:.120} once it was loaded and opened, and {saved!r:.120} was loaded"]
        )


def _metrics(step: int) -> Metrics:
    """Return metrics that every sink may rely on, and one named by an environment."""
    return {
        "reward/mean": 0.1 * step, "accuracy": 0.5, "tokens/s": 1000.0, "time/step_s": 1.5, "loss": -0.25, "own/metric": float(step),
    }  # fmt: skip


def _hostile_group(number: int) -> ScoredGroup:
    group, task = make_group(number, [0.0] * len(ADVERSARIAL)), make_task(number=number)
    return replace(group, task=task, episodes=tuple(make_episode(task, each.reply(task, 0)) for each in ADVERSARIAL))
