"""docs/catalogue.md from benchmarks/results/worlds.json: python -m tools.make_catalogue"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.metadata import REPOSITORY

PAGE = REPOSITORY / "docs/catalogue.md"
RESULTS = REPOSITORY / "benchmarks/results/worlds.json"
HEAD = """# Environments of other worlds

*Made by `tools/make_catalogue.py` from `benchmarks/results/worlds.json`, which `benchmarks.worlds` writes. A test holds the two together.*

**Imports**: it could be made. **Runs**: a task of it was run, and its own answer was scored as right; of environments that are stepped, an
episode began and took a step. **Trains**: groups of it were trained within five steps of the tiny policy; a dash: not tried.
"""


def page(sources: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [HEAD]
    for source, found in sources.items():
        rows = found["rows"]
        counts = [sum(bool(row[name]) for row in rows) for name in ("imports", "runs", "trains")]
        tried = sum(row["trains"] is not None for row in rows)
        parts.append(
            f"## {source} {found['version']}\n\n{counts[0]} of {len(rows)} import, {counts[1]} run, {counts[2]} of {tried} that were "
            f"tried train.\n\n| name | imports | runs | trains | |\n|---|---|---|---|---|\n"
            + "".join(
                f"| {row['name']} | {_said(row['imports'])} | {_said(row['runs'])} | {_said(row['trains'])} | {_cell(row['note'])} |\n"
                for row in rows
            )
        )
    return "\n".join(parts)


def _said(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
