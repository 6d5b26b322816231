"""Writes the table of docs/models.md from benchmarks/results/models.json. Run from the project root: python tools/make_models_page.py"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path("docs/models.md")
BEGINS = "<!-- from here on: tools/make_models_page.py -->\n"
RESULTS = Path("benchmarks/results/models.json")
LIMIT = 1e-3


def table(families: Mapping[str, Any]) -> str:
    rows = ["| model type | trainer | off by | engine `hf` | off by |", "|---|---|---|---|---|"]
    refused = []
    for name, found in sorted(families.items()):
        ways = {way: off for way, off in found["trainer"].items() if way.partition(",")[0] in ("packed", "rows")}
        trainer, engine = first(ways), first(found["engine"]["off"])
        if trainer is None or engine is None:
            refused.append(name)
        rows.append(f"| `{name}` | {cells(trainer, ways)} | {cells(engine, found['engine']['off'])} |")
    return (
        "\n".join(rows)
        + f"\n\nRefused with engine `hf`, since no way is exact: {', '.join(f'`{name}`' for name in refused)}.\n"
    )


def first(ways: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest exact way, in the order in which they were tried."""
    for way, off in ways.items():
        if isinstance(off, float) and off <= LIMIT:
            return way.partition(",")[0], off
    return None


def cells(chosen: tuple[str, float] | None, ways: Mapping[str, Any]) -> str:
    if chosen is not None:
        return f"{chosen[0]} | {chosen[1]:.0e}"
    numbers = [off for off in ways.values() if isinstance(off, float)]
    return f"**none** | {min(numbers):.2g}" if numbers else "**none** | fails"


def page(text: str) -> str:
    found = json.loads(RESULTS.read_text())
    head = f"transformers {found['transformers']}, torch {found['machine']['torch']}, float32 on a CPU.\n\n"
    return text.partition(BEGINS)[0] + BEGINS + "\n" + head + table(found["families"])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
