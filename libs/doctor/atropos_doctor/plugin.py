"""Offers the command `atropos doctor`, and `atropos_core.doctor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_doctor import command

    command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_doctor.command import findings_of

    return {"doctor": findings_of}
