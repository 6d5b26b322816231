"""Metrics in Weights & Biases. W&B's own service process sends them, so no step waits for the network."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.errors import ConfigError, DeadlineExceeded, ProcessDied
from atropos_core.interfaces import Sink
from atropos_core.types import Metrics, ScoredGroup
from atropos_sinks.config import WandbOptions
from atropos_sinks.settings_without_secrets import run_settings

GRACE_S = 5.0  # how far W&B may overrun its own deadlines


class WandbSink(Sink):
    """One W&B run for a run and all its resumes: the id is in the checkpoints."""

    def __init__(self, options: WandbOptions, directory: Path) -> None:
        self._options = options
        self._directory = directory
        self._id = secrets.token_hex(4)
        self._last = -1
        self._run: Any = None  # wandb.Run: its types are those of a large dynamic module

    async def open(self) -> None:
        """Raise ConfigError if the user is not logged in, DeadlineExceeded if W&B cannot be reached."""
        deadline_s = self._options.start_deadline_s
        try:
            self._run = await asyncio.wait_for(asyncio.to_thread(self._begin), deadline_s + GRACE_S)
        except TimeoutError:
            raise _unreachable(f"it did not answer within {deadline_s:g} s") from None

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert self._run is not None, "a sink is opened before it is used"
        try:
            self._run.log(dict(metrics), step=step)
        except Exception as error:
            raise ProcessDied(
                f"the service of Weights & Biases takes no more metrics: {type(error).__name__}: {error}",
                remedy="`atropos resume` continues from the last checkpoint; to leave W&B out, add `--set sink.wandb.mode=disabled`.",
            ) from error
        self._last = step

    async def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(_end, run), self._options.finish_deadline_s + GRACE_S)
        except TimeoutError:
            self._warn_of_unsent(f"did not take everything within {self._options.finish_deadline_s:g} s")
        except Exception as error:  # noqa: BLE001 - the plugin boundary: wandb's own service may be gone
            self._warn_of_unsent(f"ended early: {type(error).__name__}: {error}")

    def state(self) -> Mapping[str, Any]:
        return {"id": self._id, "step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._id, self._last = str(state["id"]), int(state["step"])

    def _warn_of_unsent(self, why: str) -> None:
        console.warn(
            f"the service of Weights & Biases {why}. What it has is in {self._directory / 'wandb'}; `wandb sync` sends it."
        )

    def _begin(self) -> Any:
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # wandb's reports of its own crashes, which go to another service
        import wandb

        options = self._options
        try:
            return wandb.init(
                id=self._id,
                resume="allow" if self._last >= 0 and options.mode == "online" else None,
                mode=options.mode,
                project=options.project,
                entity=options.entity,
                name=options.name or self._directory.name,
                group=options.group,
                tags=list(options.tags),
                dir=str(self._directory),
                config=run_settings(self._directory) if options.config else {},
                allow_val_change=True,
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=not options.system_metrics,
                    login_timeout=options.start_deadline_s,
                    init_timeout=options.start_deadline_s,
                    finish_timeout=options.finish_deadline_s,
                ),
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"Weights & Biases refuses the run: {_first_line(error)}",
                remedy="Log in (`wandb login`, or WANDB_API_KEY in the environment), or set sink.wandb.mode=offline.",
            ) from error
        except wandb.errors.CommError as error:
            raise _unreachable(_first_line(error)) from error


def _end(run: Any) -> None:
    import wandb

    try:
        run.finish()
    finally:
        wandb.teardown()  # its service process


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _unreachable(why: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"Weights & Biases cannot be reached: {why}",
        remedy="Set sink.wandb.mode=offline: `wandb sync` sends it later. Or raise sink.wandb.start_deadline_s.",
    )
