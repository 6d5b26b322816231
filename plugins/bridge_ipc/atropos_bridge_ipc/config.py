"""What a run file may say under `[bridge] use = "ipc"`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.registry import Options


class IpcOptions(Options):
    """Options of the bridge "ipc"."""

    connect_deadline_s: float = Field(
        300.0,
        gt=0,
        description="seconds for the one move of the weights into the shared segment, at start (about 1 s a gigabyte)",
    )
