"""Offers the command `atropos recipes`, and the run files as recipe:NAME."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_recipes import command

    command.add(app)


@hookimpl
def atropos_resolve_run_file(reference: str) -> Path | None:
    kind, colon, name = reference.partition(":")
    if kind != "recipe" or not colon:
        return None
    from atropos_recipes.headers import path_of

    return path_of(name)
