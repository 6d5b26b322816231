"""Several things that end at once, of which more than one may fail: one error is raised, and it names the others."""

from __future__ import annotations

from collections.abc import Iterable


def raise_first(ended: Iterable[object]) -> None:
    """Raise the first exception among these, which the others are added to as notes. Others than exceptions are results."""
    errors = [one for one in ended if isinstance(one, BaseException)]
    if errors:
        add_notes(errors[0], errors[1:], "and")
        raise errors[0]


def add_notes(error: BaseException, ended: Iterable[object], what: str) -> None:
    """Each exception among these becomes a note of `error`, which is on its way."""
    for one in ended:
        if isinstance(one, Exception):
            error.add_note(f"{what}: {type(one).__name__}: {one}")
