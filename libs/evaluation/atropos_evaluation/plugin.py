"""Offers the command `atropos eval`, and `atropos_core.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def atropos_commands(app: typer.Typer) -> None:
    from atropos_evaluation import command

    command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_evaluation.evaluate import evaluate_in_python

    return {"evaluate": evaluate_in_python}
