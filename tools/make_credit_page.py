"""Writes the tables of docs/credit.md: of our estimators as they are measured now, and of others as benchmarks/results/credit_peers.json
has them. Run from the project root: python -m tools.make_credit_page"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from atropos_credit.kit.known import KNOWN
from atropos_credit.kit.table import cells, columns, percent, rows
from benchmarks.credit_peers import FLOAT32

PAGE = Path("docs/credit.md")
RESULTS = Path("benchmarks/results/credit_peers.json")
GROUP_SIZE = 3
WORLDS = ("fixed", "stopping", "rooms", "answer")


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    made = rows(KNOWN, GROUP_SIZE, seed=0)
    ours = _table(columns(made), [cells(row, made) for row in made])
    found = json.loads(RESULTS.read_text())
    theirs = _table(
        ["", "objective", *(f"bias: {world}" for world in WORLDS), "turned"],
        [
            [
                row["estimator"], row["objective"],
                *(percent(row["worlds"][world]["bias"], FLOAT32) if world in row["worlds"] else "" for world in WORLDS),
                percent(max(one["turned"] for one in row["worlds"].values()), FLOAT32),
            ]
            for row in found["rows"]
        ],
    )  # fmt: skip
    commits = ", ".join(f"{one['repository']} at {one['version']}" for one in found["frameworks"].values())
    text = re.sub(r"(?m)^\| estimator \|.*\n(\|.*\n)+", lambda _: ours, text)
    text = re.sub(r"(?m)^\| \| objective \|.*\n(\|.*\n)+", lambda _: theirs, text)
    return re.sub(
        r"taken from these commits: .*?\. Their", f"taken from these commits: {commits}. Their", text, flags=re.S
    )


def _table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = f"|{'|'.join('---' for _ in names)}|\n"
    head, *rest = (re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |\n") for line in [names, *lines])
    return head + rule + "".join(rest)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
