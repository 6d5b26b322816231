"""The error for a field that is misspelt. Without it, the field would be ignored, and its default would be used."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from atropos_core.errors import DataError

CLOSE = 0.8  # of difflib: `score` is 0.91 of `scores`; `prompt_tokens`, which environments add, is 0.63 of `tokens`
MOST_COMPARED = 20  # a body may have any number of names


def refuse_misspelt(given: Collection[Any], known: Collection[str], where: str = "") -> None:
    """Raise DataError if a name is not known, but close to a known one that is not given."""
    others = [name for name in given if isinstance(name, str) and name not in known]
    absent = [name for name in known if name not in given] if others else []
    for name in others[:MOST_COMPARED]:
        if near := difflib.get_close_matches(name[:100].lower().replace("-", "_"), sorted(absent), n=1, cutoff=CLOSE):
            raise DataError(
                f"the field {name[:100]!r} is not known{where and f' in {where}'}, so its value would be ignored.",
                remedy=f"Did you mean {near[0]!r}?",
            )
