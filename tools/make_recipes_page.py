"""Writes the table and the files of docs/recipes.md from the recipes. Run: python -m tools.make_recipes_page

`python -m tests.planned_recipes` writes the lines about memory in their headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from atropos_recipes.headers import Recipe, names, read

PAGE = Path(__file__).parents[1] / "docs/recipes.md"
FILES = "../libs/recipes/atropos_recipes/run_files"
TABLE, TABLE_ENDS = "<!-- the table: made by tools/make_recipes_page.py -->\n", "<!-- the end of the table -->\n"
SHOWN = "<!-- the files: made by tools/make_recipes_page.py -->\n"


def place(name: str) -> str:
    """Return the heading under which a recipe is shown."""
    size = re.match(r"(\d+)gb", name)
    return "A laptop" if name.startswith("laptop") else f"One GPU of {size[1]} GB" if size else "Several GPUs"


def cell(text: str) -> str:
    linked = re.sub(r"https?://[^\s,)]+", lambda url: f"[source]({url[0]})", text)
    return linked.replace("|", "\\|")


def rows(recipes: Iterable[Recipe]) -> list[str]:
    made = ["| recipe | hardware | model | memory | expected result | measured |", "|---|---|---|---|---|---|"]
    for one in recipes:
        cells = (one.hardware, one.model, one.memory.removesuffix(", by the memory plan"), one.result, one.measured)
        made.append(f"| [{one.name}](#{one.name.replace('.', '')}) | {' | '.join(map(cell, cells))} |")
    return made


def files(recipes: Iterable[Recipe]) -> list[str]:
    parts, heading = [], ""
    for one in recipes:
        if place(one.name) != heading:
            heading = place(one.name)
            parts += [f"## {heading}", ""]
        parts += [
            f"### {one.name}",
            "",
            f"`atropos recipes {one.name}` prints [this file]({FILES}/{one.path.name}):",
            "",
        ]
        parts += ["```toml", one.path.read_text().rstrip("\n"), "```", ""]
    return parts


def page(written: str) -> str:
    """Return the page with a new table and new files; the rest of it is `written` by hand."""
    recipes = [read(name) for name in names()]
    before, _, after = written.partition(TABLE)
    between = after.partition(TABLE_ENDS)[2].partition(SHOWN)[0]
    lines = [before + TABLE, *rows(recipes), "", TABLE_ENDS + between + SHOWN, *files(recipes)]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
