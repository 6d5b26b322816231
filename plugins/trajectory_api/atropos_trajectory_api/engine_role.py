"""An engine alone, for a trainer elsewhere that sends it weights."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

from atropos_core import console
from atropos_core.assemble import Plan, build_for_evaluation
from atropos_core.guards import watched
from atropos_core.scratch import owned_prefix, sweep
from atropos_trajectory_api.door import open_door
from atropos_trajectory_api.roles import draining_signals


async def serve_engine(plan: Plan, where: str, token_file: Path | None) -> None:
    """Until SIGTERM or Ctrl-C, or until the engine's process ends. Raises ConfigError, ProcessDied."""
    stop = asyncio.Event()
    sweep("engine")
    with draining_signals(stop), tempfile.TemporaryDirectory(prefix=owned_prefix("engine")) as directory:
        (Path(directory) / "logs").mkdir()
        parts = await build_for_evaluation(replace(plan, transports=("checkpoint",)), Path(directory))
        try:
            info = await parts.engine.open()
            door = await open_door(parts.engine, where, token_file, info, allow_weights=True)
            try:
                console.facts([("engine", f"{plan.config.engine.use}, {plan.model.summary}"), ("at", door.url)])
                await watched(_until(stop), parts.children)
            finally:
                await door.close()
        finally:
            await parts.close()


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
