"""Metrics in MLflow. A separate thread sends them, so that no step waits for the network or fails because of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.run_file import flatten
from atropos_core.errors import ConfigError, DeadlineExceeded
from atropos_core.interfaces import Sink
from atropos_core.storage.run_records import metric_rows
from atropos_core.types import Metrics, ScoredGroup
from atropos_sinks.config import MlflowOptions
from atropos_sinks.mlflow_run import TrackedRun, recorded_name
from atropos_sinks.settings_without_secrets import run_settings

AGAIN_S = 5.0  # wait after a step that could not be sent
GRACE_S = 2.0
FILES = ("config.toml", "metrics.jsonl", "health.jsonl")


class MlflowSink(Sink):
    """One MLflow run for a run and all its resumes. The checkpoints hold its id.

    MLflow cannot delete a metric and accepts the same step twice. So after a resume, or when an answer did not come, the sink
    first reads what MLflow has. A resume also sends, from metrics.jsonl, what a killed run had not sent yet.
    """

    def __init__(self, options: MlflowOptions, directory: Path, steps: int) -> None:
        self._options, self._directory, self._steps = options, directory, steps
        self._id: str | None = None
        self._last = -1
        self._run: TrackedRun | None = None
        self._there: set[tuple[str, int]] = set()
        self._waiting: deque[tuple[int, dict[str, float]]] = deque()
        self._news, self._is_closing = threading.Event(), False
        self._sender: threading.Thread | None = None

    async def open(self) -> None:
        """Raise ConfigError if no URI is given or MLflow refuses it, DeadlineExceeded if nothing answers there."""
        uri = self._options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise ConfigError(
                "the sink mlflow has no tracking URI.",
                remedy="Set sink.mlflow.tracking_uri, or MLFLOW_TRACKING_URI: http://HOST:PORT, or file:/PATH.",
            )
        deadline_s = self._options.start_deadline_s
        began: asyncio.Future[TrackedRun] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._begin, args=(uri, began), name="mlflow", daemon=True).start()
        try:
            self._run = await asyncio.wait_for(began, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"MLflow at {_shown(uri)} did not answer within {deadline_s:g} s.",
                remedy="Start it, or leave [sink.mlflow] out: metrics.jsonl has the same metrics.",
            ) from None
        except Exception as error:
            raise ConfigError(
                f"MLflow at {_shown(uri)} cannot record the run: {_first_line(error)}",
                remedy="Check sink.mlflow.tracking_uri, or leave [sink.mlflow] out: metrics.jsonl has the same metrics.",
            ) from error
        self._id = self._run.id
        if late := {step for _, step in self._there if step > self._last}:
            console.warn(
                f"MLflow already has steps {min(late)} to {max(late)} from before the resume and keeps their values. The new "
                "values of these steps are only in metrics.jsonl."
            )
        self._news.clear()
        self._is_closing = False
        self._sender = threading.Thread(target=self._send, args=(self._run,), name="mlflow", daemon=True)
        self._sender.start()

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert self._run is not None, "a sink is opened before it is used"
        self._waiting.append((step, dict(metrics)))
        self._last = step
        self._news.set()

    async def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        self._is_closing = True
        self._news.set()
        await asyncio.to_thread(sender.join, self._options.finish_deadline_s + GRACE_S)
        if sender.is_alive() or self._waiting:
            left = ", ".join(str(step) for step, _ in list(self._waiting)[:5]) or "its end"
            console.warn(
                f"MLflow did not take everything within {self._options.finish_deadline_s:g} s: it lacks step {left}"
                f"{' and others' if len(self._waiting) > 5 else ''}. metrics.jsonl has all."
            )

    def state(self) -> Mapping[str, Any]:
        return {"id": self._id, "step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._id, self._last = state["id"], int(state["step"])

    # -- in separate threads

    def _begin(self, uri: str, began: asyncio.Future[TrackedRun]) -> None:
        loop = began.get_loop()
        try:
            run = TrackedRun(self._options, uri, self._options.name or self._directory.resolve().name, self._id)
            if self._options.config:
                run.add_params(dict(flatten(run_settings(self._directory))))
            if self._id is not None:
                self._there = run.recorded()
                self._waiting.extend(self._unsent())
        except Exception as error:  # noqa: BLE001 - the plugin boundary: MLflow's own errors, and those of its transport
            _tell(loop, began, began.set_exception, error)
        else:
            _tell(loop, began, began.set_result, run)

    def _unsent(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the steps up to the checkpoint that MLflow lacks, or has only in part."""
        for row in metric_rows(self._directory)[0]:
            step = int(row.pop("step"))
            if step <= self._last and any((recorded_name(name), step) not in self._there for name in row):
                yield step, row

    def _send(self, run: TrackedRun) -> None:
        """Send every step in order, until the last one is sent, or the sink is closed and out of time."""
        is_away = False
        while not (self._is_closing and not self._waiting):
            if not self._waiting:
                self._news.wait()
                self._news.clear()
                continue
            step, metrics = self._waiting[0]
            try:
                if is_away:
                    self._there |= run.recorded()
                run.add(step, metrics, self._there)
            except Exception as error:  # noqa: BLE001 - the plugin boundary
                if not is_away:
                    console.warn(f"MLflow does not accept step {step}; trying again: {_first_line(error)}")
                is_away = True
                if self._is_closing:
                    return
                self._news.wait(AGAIN_S)
                self._news.clear()
                continue
            if is_away:
                console.say(f"MLflow accepts metrics again, from step {step} on.")
            is_away = False
            self._waiting.popleft()
        try:
            if self._options.artifacts:
                run.add_files([path for name in FILES if (path := self._directory / name).is_file()])
            run.end("FINISHED" if self._last >= self._steps else "KILLED")
        except Exception as error:  # noqa: BLE001 - the plugin boundary
            console.warn(f"MLflow could not be told that the run has ended: {_first_line(error)}")


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], call: Any, value: Any) -> None:
    try:
        loop.call_soon_threadsafe(lambda: future.done() or call(value))
    except RuntimeError:  # the loop has ended meanwhile
        pass


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _shown(uri: str) -> str:
    """The URI without the user and password that it may contain."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
