"""Metrics in Trackio's database. Each step is written before the next one begins."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_core.interfaces import Sink
from atropos_core.types import Metrics, ScoredGroup
from atropos_sinks.config import TrackioOptions
from atropos_sinks.settings_without_secrets import run_settings

LOCKED_S = 30.0  # how long another process may lock the database, as in Trackio


class TrackioSink(Sink):
    """One Trackio run for a run and all its resumes. The checkpoints hold its id.

    `trackio.log` passes metrics to a thread: a kill loses them, and after an error it only says that data may be dropped. So this
    sink calls what that thread calls, `SQLiteStorage.bulk_log`, and waits for it.
    """

    def __init__(self, options: TrackioOptions, directory: Path) -> None:
        self._options, self._directory = options, directory
        self._id = secrets.token_hex(16)
        self._name = options.name or directory.resolve().name
        self._last = -1
        self._settings: dict[str, Any] | None = None  # sent with the first step
        self._storage: Any = None  # trackio's SQLiteStorage, whose module is not typed
        self._renamed: Callable[[str], str] = str

    async def open(self) -> None:
        """Raise ConfigError for a project name that Trackio refuses, RunDirectoryError if its directory cannot be written."""
        await asyncio.to_thread(self._begin)

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert self._storage is not None, "a sink is opened before it is used"
        named = {self._renamed(name): float(value) for name, value in metrics.items()}
        await asyncio.to_thread(self._write, self._add, [named], [step])
        self._last = step

    async def close(self) -> None:
        self._storage = None  # each step has its own connection

    def state(self) -> Mapping[str, Any]:
        return {"id": self._id, "step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._id, self._last = str(state["id"]), int(state["step"])

    # -- in separate threads

    def _begin(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import RESERVED_KEYS, TRACKIO_DIR, get_storage_mode

        self._storage = SQLiteStorage
        self._renamed = lambda name: f"__{name}" if name in RESERVED_KEYS or name.startswith("__") else name
        try:
            SQLiteStorage.validate_project_name(self._options.project)
        except ValueError as error:
            raise ConfigError(f"sink.trackio.project: {error}") from error
        if get_storage_mode() != "sqlite":
            raise ConfigError(
                f"Trackio keeps no database in {TRACKIO_DIR}: it is on a network, where several writers would damage it.",
                remedy="Set TRACKIO_DIR to a local directory, or TRACKIO_STORAGE_MODE=sqlite if only this run writes there.",
            )
        self._write(SQLiteStorage.init_db, self._options.project)
        self._write(self._cut_back)
        self._settings = self._settings_of_run()

    def _cut_back(self) -> None:
        """Delete what a dead run recorded after its checkpoint: those steps run again."""
        path = self._storage.get_project_db_path(self._options.project)
        with closing(sqlite3.connect(path, timeout=LOCKED_S)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (self._id, self._last))

    def _add(self, metrics: list[dict[str, float]], steps: list[int]) -> None:
        settings, self._settings = self._settings, None
        self._storage.bulk_log(self._options.project, self._name, metrics, steps, run_id=self._id, config=settings)

    def _settings_of_run(self) -> dict[str, Any]:
        """The settings that Trackio's pages show, as `trackio.init` writes them, and the run file."""
        there = self._storage.get_run_config(self._options.project, run_id=self._id) or {}
        own = {"_Created": there.get("_Created", datetime.now(UTC).isoformat()), "_Group": self._options.group}
        return {**run_settings(self._directory), **own} if self._options.config else own

    def _write(self, write: Callable[..., Any], *arguments: Any) -> None:
        try:
            write(*arguments)
        except (OSError, sqlite3.Error) as error:
            path = self._storage.get_project_db_path(self._options.project)
            raise RunDirectoryError(
                f"Trackio's {path} cannot be written: {error}.",
                remedy="Set TRACKIO_DIR to a writable directory with free space, or leave [sink.trackio] out: metrics.jsonl has the "
                "same metrics. What was saved is intact, and `atropos resume` continues from it.",
            ) from error
