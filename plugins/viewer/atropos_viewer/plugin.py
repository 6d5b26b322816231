"""Offers the command `atropos view`, and `atropos_core.view` and `atropos_core.save_view`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_viewer import command

    command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_viewer.python_functions import save_view, view

    return {"view": view, "save_view": save_view}
