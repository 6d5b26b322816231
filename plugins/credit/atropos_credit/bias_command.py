"""`atropos bias`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from atropos_credit.kit.known import Known
    from atropos_credit.kit.table import Measurement


EXPLAINED = (
    "bias: |E g - true| / |true|, for the expected gradient E g and the true one.",
    "turned: the part of E g at right angles to the true gradient, over the part along it: no learning rate corrects it.",
    "noise: the deviation of one group's gradient, over the part of E g along the true one; in `stopping`, if measured there.",
)


def add(app: typer.Typer) -> None:
    app.command("bias", rich_help_panel="Look")(bias)


def bias(
    estimators: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ESTIMATOR",
            help="FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, or a name of the table. Without any: the whole table.",
            show_default=False,
        ),
    ] = None,
    group_size: Annotated[int, typer.Option(min=2, max=6, help="Episodes of a group.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the policies' logits.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Measure how far the expected gradient of an advantage estimator is from that of its objective, on policies that are small
    enough to list every group of episodes.

    A function takes the episodes of one task (atropos_credit.turns.Turns) and returns an array for each: the advantages of its
    turns, or of its tokens. It is compared with the gradient of the expected score.

    [bold]Examples[/]

      atropos bias

      atropos bias ./mine.py:my_advantages --group-size 4

      atropos bias turn_returns gigpo --json
    """
    from dataclasses import asdict

    from atropos_core import console
    from atropos_credit.kit.table import cells, columns, rows

    made = rows(_named_estimators(estimators or ()), group_size, seed)
    if as_json:
        console.document({"group_size": group_size, "seed": seed, "rows": [_document(row, asdict) for row in made]})
        return
    console.table(columns(made), [cells(row, made) for row in made])
    console.say()
    for line in EXPLAINED:
        console.say(line)


def _named_estimators(names: Sequence[str]) -> Sequence[Known]:
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.references import is_reference, load_reference
    from atropos_credit.kit.known import KNOWN, Known

    if not names:
        return KNOWN
    chosen: list[Known] = []
    for name in names:
        if is_reference(name):
            made = load_reference(name)
            if not callable(made):
                raise ConfigError(f"{name!r} is a {type(made).__name__}, but an estimator is a function.")
            chosen.append(Known(name, made))
            continue
        found = [one for one in KNOWN if name in (one.name, one.name.partition(",")[0])]
        if not found:
            raise ConfigError(
                f"{name!r} is not in the table of estimators.",
                remedy=f"Choose one of: {', '.join(dict.fromkeys(one.name.partition(',')[0] for one in KNOWN))}; or name a function, as "
                "./mine.py:my_advantages.",
            )
        chosen += found
    return chosen


def _document(row: Measurement, asdict: Any) -> dict[str, Any]:
    return {
        "estimator": row.known.name,
        "objective": row.known.objective_name,
        "average": row.known.average,
        "worlds": {world: asdict(measured) for world, measured in row.measured.items()},
    }
