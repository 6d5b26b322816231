"""The options of `[bridge] use = "ipc"`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.options import Options


class IpcOptions(Options):
    """Options of the bridge "ipc"."""

    connect_deadline_s: float = Field(
        300.0,
        gt=0,
        description="seconds to move the weights at the start and compare them with the model directory",
    )
    copies: bool | None = Field(
        None,
        description="true: engines load a copy of the weights at each publish; unset: only those that cannot share them;"
        " false: those are refused",
    )
