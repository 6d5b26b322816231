"""Removing what is over: snapshots of sessions that are finished or silent, and checkpoints after their time to live."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from atropos_core import console
from atropos_core.errors import RunDirectoryError
from atropos_tinker_api.state.checkpoints import Checkpoints
from atropos_tinker_api.state.samplers import Samplers
from atropos_tinker_api.state.sessions import Sessions

EVERY_S = 60.0


async def tidy(sessions: Sessions, samplers: Samplers, checkpoints: Checkpoints, silent_s: float) -> NoReturn:
    """Look again and again. `silent_s`: how long a client may be silent before the snapshots of its session are removed."""
    warned = ""
    while True:
        await asyncio.sleep(min(EVERY_S, silent_s))
        samplers.remove_of(sessions.over(silent_s))
        try:
            for directory in await asyncio.to_thread(checkpoints.expired):
                checkpoints.at(directory)  # it may have been written again since
        except (OSError, RunDirectoryError) as error:
            if warned != (warned := str(error)):
                console.warn(f"checkpoints after their time to live could not be removed: {error}")
