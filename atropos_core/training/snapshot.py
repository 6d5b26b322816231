"""A run's state between two steps: what a checkpoint holds in addition to the weights, and how a resume restores it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_core import console
from atropos_core.errors import CheckpointError
from atropos_core.interfaces import Snapshotted
from atropos_core.rollouts.source import Source
from atropos_core.training.parts import Parts
from atropos_core.types import Metrics


@dataclass
class Progress:
    """The progress of a run, saved with it."""

    step: int = 0
    version: int = 0
    empty_steps: int = 0  # in a row
    first: Metrics = field(default_factory=dict)  # the evaluation before the first step
    last: Metrics = field(default_factory=dict)
    syncs: int = 0  # how often weights were published
    sync_s: float = 0.0  # and how long that took in all
    published_bytes: int = 0  # on disk, for the last of them

    @classmethod
    def restored(cls, saved: Mapping[str, Any], step: int) -> Progress:
        """Return the progress of the checkpoint of `step`. Raises KeyError, TypeError, ValueError."""
        made = cls(**saved)
        for name, usual in vars(cls()).items():
            values = [*value.values()] if isinstance(value := getattr(made, name), dict) else [value]
            if isinstance(value, dict) != isinstance(usual, dict) or not all(
                type(one) in (int, float) for one in values
            ):
                raise TypeError(f"progress.{name} is {value!r:.100}")
            if isinstance(usual, int) and (not isinstance(value, int) or value < 0):
                raise ValueError(f"progress.{name} is {value!r:.100}")
        if made.step != step or made.version > step:
            raise ValueError(f"it is of step {made.step} and version {made.version}, in the checkpoint of step {step}")
        return made


class Snapshot:
    """The state that belongs to the present weights. A stop may find the next step half done: some groups are settled, and running
    statistics include them. That step is run again after the resume, so none of it may be in the checkpoint. Sinks give their
    state when it is saved, because they learn of a step only at its end. So do components that take snapshots themselves."""

    def __init__(self, parts: Parts, source: Source) -> None:
        self._parts = parts
        self._source = source
        self._text = ""  # serialised, because components may keep changing the objects that they return

    def take(self, progress: Progress) -> None:
        """Remember the state: a step has ended, or none has begun."""
        states = {}
        for label, part in self._parts.stateful().items():
            if isinstance(part, Snapshotted):
                part.take_snapshot()
            elif not _is_sink(label):
                states[label] = part.state()
        self._text = json.dumps({"progress": vars(progress), "source": self._source.state(), "parts": states})

    def state(self) -> dict[str, Any]:
        """Return the state that was taken."""
        state: dict[str, Any] = json.loads(self._text)
        for label, part in self._parts.stateful().items():
            if isinstance(part, Snapshotted):
                state["parts"][label] = part.snapshot()
            elif _is_sink(label):
                state["parts"][label] = part.state()
        return state


def restore_parts(parts: Parts, states: Mapping[str, Any]) -> None:
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


def _is_sink(label: str) -> bool:
    return label.startswith("sink.")
