"""Sinks: lines on the console, and JSON lines in the run directory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from atropos_core import console
from atropos_core.builtin.config import JsonlOptions
from atropos_core.console import StepProgress
from atropos_core.interfaces import Sink
from atropos_core.storage.atomic import unwritable
from atropos_core.types import Metrics, ScoredGroup


class JsonlSink(Sink):
    """`metrics.jsonl`, one object a step, and `rollouts/step-000001.jsonl`, one line an episode.

    A resumed run cuts metrics.jsonl back to the checkpoint and removes the rollouts after it.
    """

    def __init__(self, options: JsonlOptions, directory: Path) -> None:
        self._metrics = directory / "metrics.jsonl"
        self._rollouts = directory / "rollouts"
        self._every = options.rollouts_every
        self._file: IO[bytes] | None = None
        self._keep: Mapping[str, Any] = {"bytes": 0, "step": -1}
        self._last = -1

    async def open(self) -> None:
        try:
            self._rollouts.mkdir(exist_ok=True)
            for path in self._rollouts.glob("step-*.jsonl"):
                if int(path.stem.removeprefix("step-")) > self._keep["step"]:
                    path.unlink()
            self._file = self._metrics.open("ab")
            if (there := self._file.tell()) < self._keep["bytes"]:
                console.warn(
                    f"{self._metrics} is shorter ({there} bytes) than it was at the checkpoint ({self._keep['bytes']}): lines "
                    "of steps before it are gone."
                )
            self._file.truncate(min(there, self._keep["bytes"]))
        except OSError as error:
            raise unwritable(self._metrics, error) from error

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert self._file is not None, "a sink is opened before it is used"
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            if groups and self._every and step % self._every == 0:
                rows = [json.dumps(row, ensure_ascii=False, default=str) for group in groups for row in _rows(group)]
                (self._rollouts / f"step-{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
        except OSError as error:
            raise unwritable(self._metrics, error) from error
        self._last = step

    async def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise unwritable(self._metrics, error) from error
            finally:
                self._file = None

    def state(self) -> Mapping[str, Any]:
        if self._file is None:
            return {"bytes": 0, "step": -1}
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._keep = state
        self._last = int(state["step"])


class ConsoleSink(Sink):
    """Progress for a person: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._progress: StepProgress | None = None

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        if self._progress is None:
            self._progress = StepProgress(self._steps)
        self._progress.show(step, metrics)

    async def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None


def _rows(group: ScoredGroup) -> list[dict[str, Any]]:
    shared = {"task": group.task.id, "environment": group.draw.environment, "draw": group.draw.id}
    advantages = np.full(len(group.episodes), np.nan) if group.advantages is None else group.advantages
    rows: list[dict[str, Any]] = [
        shared
        | {
            "reward": float(group.rewards[member]),
            "advantage": float(advantages[member]) if np.isfinite(advantages[member]) else None,
            "parts": {name: float(values[member]) for name, values in group.parts.items()} | dict(episode.parts),
            "correct": episode.correct,
            "finish": episode.finish,
            "tokens": sum(int(rollout.sampled.sum()) for rollout in episode.rollouts),
            "messages": [dict(message) for message in episode.messages],
        }
        for member, episode in enumerate(group.episodes)
    ]
    return rows + [shared | {"failed": one.cause, "where": one.where} for one in group.failed]
