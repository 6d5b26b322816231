"""The recipes, and what the comment at the top of each says.

A recipe begins with its title and then has one line for each of FIELDS, `# hardware: one GPU of 24 GB`, which further lines
continue with three spaces after the `#`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from atropos_core.errors import ConfigError

FOLDER = Path(__file__).parent / "run_files"
FIELDS = ("hardware", "install", "memory", "time", "result", "measured")
MEASURED = ("here", "by ", "no")  # how `measured` begins: in this project; by the authors that it names; not at all


@dataclass(frozen=True)
class Recipe:
    """A run file and its header."""

    name: str
    path: Path
    title: str
    model: str
    hardware: str
    install: str
    memory: str  # by the memory plan
    time: str
    result: str  # what to expect, with its source
    measured: str

    @property
    def devices(self) -> dict[str, int]:
        """Return the bytes of the hardware that the header states, by device as in a memory plan."""
        found: dict[str, int] = {}
        if host := re.search(r"(\d+) GB of (?:host )?memory", self.hardware):
            found["cpu"] = int(host[1]) * 10**9
        if cards := re.search(r"(one|\d+) GPUs? of (\d+) GB", self.hardware):
            count = 1 if cards[1] == "one" else int(cards[1])
            found |= {f"cuda:{index}": int(cards[2]) << 30 for index in range(count)}  # as cards are sold
        return found


def names() -> list[str]:
    """Return the names of all recipes, in the order of the table."""
    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=_order)


def _order(name: str) -> tuple[int, str]:
    """Order laptops first, then by the card's memory, then everything else."""
    size = re.match(r"(\d+)gb", name)
    return (0 if name.startswith("laptop") else int(size[1]) if size else 1_000), name


def path_of(name: str) -> Path:
    """Return the file of a recipe. Raises ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError(
            f"{name!r} is not a recipe.",
            remedy=f"Choose one of: {', '.join(names())}. `atropos recipes` describes them.",
        )
    return FOLDER / f"{name}.toml"


def read(name: str) -> Recipe:
    """Read a recipe. Raises ValueError for a header that is not in the fixed form."""
    path = path_of(name)
    text = path.read_text(encoding="utf-8")
    header = re.match(r"(?:#.*\n)+", text)
    title, *rest = [line.removeprefix("#").removeprefix(" ") for line in header[0].splitlines()] if header else [""]
    found: dict[str, str] = {}
    for line in rest:
        key, colon, value = line.partition(": ")
        if colon and key in FIELDS:
            found[key] = value.strip()
        elif line.startswith("  ") and found:
            found[list(found)[-1]] += f" {line.strip()}"
        elif line:
            raise ValueError(f"{path.name}: {line!r} is neither one of {', '.join(FIELDS)} nor the continuation of one")
    if not title or list(found) != list(FIELDS):
        raise ValueError(f"{path.name}: its header needs a title, and then {', '.join(FIELDS)}, in this order")
    if not found["measured"].startswith(MEASURED):
        raise ValueError(f"{path.name}: measured begins with one of {', '.join(MEASURED)}")
    return Recipe(name, path, title, str(tomllib.loads(text)["model"]), **found)
