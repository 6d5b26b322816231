"""Writes the last part of docs/hooks.md from the hook specifications. Run from the project root: python tools/make_hooks_page.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from atropos_core.plugins import spec as hooks

PAGE = Path("docs/hooks.md")
BEGINS = "## Hooks\n\n"

MODULES = re.compile(r"'|\b(interfaces|launchers|services)\.")  # in an annotation: its quotes, and core's modules


def sections() -> str:
    return "\n".join(
        f"### `{name}{MODULES.sub('', str(inspect.signature(hook)))}`\n\n{inspect.getdoc(hook)}\n"
        for name, hook in vars(hooks).items()
        if name.startswith("atropos_")
    )


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(BEGINS)[0] + BEGINS + sections())
