"""`atropos recipes`."""

from __future__ import annotations

from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    app.command("recipes", rich_help_panel="Train")(recipes)


def complete(incomplete: str) -> list[str]:
    from atropos_recipes.headers import names

    return [name for name in names() if name.startswith(incomplete)]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print the run file of this recipe, to redirect it into a file of yours.",
            show_default=False,
            autocompletion=complete,
        ),
    ] = None,
) -> None:
    """List run files for real models: one per situation, with its hardware and what to expect. `recipe:NAME` stands for one
    wherever a command takes a run file.

    [bold]Examples[/]

      atropos recipes

      atropos recipes 24gb-qwen2.5-1.5b-lora > my-run.toml

      atropos run recipe:24gb-qwen2.5-1.5b-lora --steps 20

      atropos plan recipe:24gb-qwen2.5-1.5b-lora --gpu 24
    """
    from atropos_core import console
    from atropos_recipes.headers import names, path_of, read

    if name is not None:
        console.say(path_of(name.removeprefix("recipe:")).read_text(encoding="utf-8").rstrip("\n"))
        return
    found = [read(one) for one in names()]
    console.table(
        ("recipe", "hardware", "model", "measured"),
        [(one.name, one.hardware, one.model, one.measured) for one in found],
    )
    console.say("`atropos recipes NAME` prints one, with what to expect; `atropos run recipe:NAME` runs it.")
    console.say("A card sold as 24 GB has 24 GiB, which is 25.8 GB in a recipe's line `memory` and in memory plans.")
