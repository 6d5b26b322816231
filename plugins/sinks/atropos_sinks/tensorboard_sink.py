"""Scalars in TensorBoard event files, written with the library tensorboard, without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_core.storage.atomic import unwritable
from atropos_core.types import Metrics, ScoredGroup
from atropos_sinks.config import TensorboardOptions
from atropos_sinks.file_sink import FileSink


class TensorboardSink(FileSink):
    """Start a new event file for a run and for each resume of it.

    Its session start names the step at which the file begins. TensorBoard ignores what earlier files have from that step on:
    what a dead run wrote after its checkpoint.
    """

    def __init__(self, options: TensorboardOptions, directory: Path) -> None:
        super().__init__(directory / options.directory)
        self._directory = self._path
        self._flush_s = options.flush_s
        self._flushed = 0.0
        self._records: Any = None  # tensorboard's RecordWriter, which has no types

    async def open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path = self._directory / _next_name(self._directory)
            self._file = self._path.open("xb")
            self._records = RecordWriter(self._file)
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            began = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=self._last + 1, session_log=began))
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._flushed = time.monotonic()

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._file is not None, "a sink is opened before it is used"
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        try:
            self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            if time.monotonic() - self._flushed >= self._flush_s:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._last = step

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _next_name(directory: Path) -> str:
    """The next file name. TensorBoard reads a directory in the order of names: seconds, then a number within the same second."""
    there = sorted(path.name for path in directory.glob("events.out.tfevents.*"))
    after = there[-1].split(".")[3:5] if there else ["0", ""]
    second = max(int(time.time()), int(after[0]))
    number = int(after[1]) + 1 if second == int(after[0]) and after[1].isdigit() else 0
    return f"events.out.tfevents.{second:010d}.{number:04d}.atropos"
