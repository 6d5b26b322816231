"""What processes call records and errors between them, as lines of text: classes travel by name, and fields by their order.

`python -m tests.pins.wire` writes wire.txt anew. It refuses to where something has changed or gone and `codec.MAGIC` has not: an
older end would misread what it is sent, where another magic is refused in so many words.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from atropos_core import codec, errors
from atropos_core.codec.columns import GroupColumns

RECORDED = Path(__file__).with_name("wire.txt")


def lines() -> list[str]:
    records = [f"record {name}: {_fields(made)}" for name, made in sorted(codec.RECORDS.items())]
    known = [
        f"error {name}"
        for name, made in sorted(vars(errors).items())
        if isinstance(made, type) and issubclass(made, errors.AtroposError)
    ]
    optional = [f"optional {made.__name__}: {name}" for made, names in codec.OPTIONAL.items() for name in names]
    return [f"magic {codec.MAGIC.decode()}", *records, *optional, f"columns: {_fields(GroupColumns)}", *known]


def _fields(made: type) -> str:
    return " ".join(field.name for field in dataclasses.fields(made) if field.name not in codec.OPTIONAL.get(made, ()))


def broken(before: list[str], now: list[str]) -> list[str]:
    """Lines that an older end relies on and that are there no more, under the same magic. New ones it need not know."""
    return [] if before[:1] != now[:1] else sorted(set(before) - set(now))


if __name__ == "__main__":
    before = RECORDED.read_text().splitlines() if RECORDED.exists() else []
    if gone := broken(before, lines()):
        sys.exit("\n  ".join(["changed or gone: give codec.MAGIC another number.", *gone]))
    RECORDED.write_text("\n".join(lines()) + "\n")
