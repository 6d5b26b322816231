"""A run's state between two steps: what a checkpoint holds in addition to the weights, and how a resume restores it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.errors import CheckpointError
from atropos_core.interfaces import Marked
from atropos_core.rollouts.source import Source
from atropos_core.storage.atomic import unwritable
from atropos_core.storage.reading import numbered
from atropos_core.training.parts import Parts


class Boundary:
    """The state that belongs to the present weights. A stop may find the next step half done: some groups are settled, and running
    statistics include them. That step is run again after the resume, so none of it may be in the checkpoint. Sinks give their
    state when it is saved, because they learn of a step only at its end. So do parts that mark the end of a step themselves."""

    def __init__(self, parts: Parts, source: Source) -> None:
        self._parts = parts
        self._source = source
        self._text = ""  # serialised, because components may keep changing the objects that they return

    def mark(self, progress: Mapping[str, Any]) -> None:
        """Remember the state: a step has ended, or none has begun."""
        states = {}
        for label, part in self._parts.stateful().items():
            if isinstance(part, Marked):
                part.mark()
            elif not _is_sink(label):
                states[label] = part.state()
        self._text = json.dumps({"progress": progress, "source": self._source.state(), "parts": states})

    def state(self) -> dict[str, Any]:
        """Return the state that was marked."""
        state: dict[str, Any] = json.loads(self._text)
        for label, part in self._parts.stateful().items():
            if isinstance(part, Marked):
                state["parts"][label] = part.marked()
            elif _is_sink(label):
                state["parts"][label] = part.state()
        return state


def take_up(parts: Parts, states: Mapping[str, Any]) -> None:
    """Restore the state of each part. Raises CheckpointError if a part cannot take it."""
    stateful = parts.stateful()
    for label in sorted(states.keys() - stateful.keys()):
        console.warn(f"{label} was part of this run when its checkpoint was saved, and is not now: its state is lost.")
    for label, part in stateful.items():
        if label not in states:
            console.warn(f"the checkpoint has no state of {label}: it begins anew.")
            continue
        try:
            part.load(states[label])
        except Exception as error:  # the plugin boundary: the state may be another plugin's or version's
            raise CheckpointError(
                f"{label} cannot take up its state from the checkpoint: {type(error).__name__}: {error}",
                remedy="Resume with the components and options that the run had, or start a new run.",
            ) from error


def forget_evaluations_after(step: int, directory: Path) -> None:
    """Remove what a run that died wrote after its last checkpoint. Raises RunDirectoryError."""
    for evaluated, path in numbered(directory / "rollouts", "eval-", ".jsonl"):
        if evaluated > step:
            try:
                path.unlink()
            except OSError as error:
                raise unwritable(path, error) from error


def _is_sink(label: str) -> bool:
    return label.startswith("sink.")
