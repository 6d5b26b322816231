"""Raise one error when several things end together, with the other errors as notes."""

from __future__ import annotations

from collections.abc import Iterable


def raise_first(ended: Iterable[object]) -> None:
    """Raise the first exception among these, with the others as notes. Other values are results and are ignored."""
    errors = [one for one in ended if isinstance(one, BaseException)]
    if errors:
        add_notes(errors[0], errors[1:], "and")
        raise errors[0]


def add_notes(error: BaseException, ended: Iterable[object], what: str) -> None:
    """Add each exception among these as a note to `error`, which is being raised."""
    for one in ended:
        if isinstance(one, Exception):
            error.add_note(f"{what}: {type(one).__name__}: {one}")
