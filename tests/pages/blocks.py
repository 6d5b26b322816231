"""The code blocks of README.md, CONTRIBUTING.md, docs/ and the plugins' READMEs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY

PATTERNS = (
    "*.md",
    "docs/*.md",
    "docs/coming-from/*.md",
    "docs/tutorial/*.md",
    "distribution/README.md",
    "libs/*/README.md",
    "plugins/*/README.md",
)
PAGES = [path for pattern in PATTERNS for path in sorted(REPOSITORY.glob(pattern))]


@dataclass(frozen=True)
class Block:
    """One fenced block. `page` is relative to the repository, `line` the number of its first line there."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0].strip()

    @property
    def commands(self) -> list[str]:
        """As they are typed: continued lines joined, comments behind them left out."""
        joined = re.sub(r"\n  +(?=\S)", " ", self.text)
        return [line for each in joined.splitlines() if (line := re.sub(r"\s+#.*$", "", each).strip())]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    name = str(page.relative_to(REPOSITORY))
    return [Block(name, text[: at.start()].count("\n") + 2, at[1], at[2]) for at in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def the_block(page: str, first: str) -> Block:
    """The one block of a page whose first line begins so."""
    [found] = [block for block in BLOCKS if block.page == page and block.first.startswith(first)]
    return found
