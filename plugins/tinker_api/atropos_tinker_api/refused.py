"""The error that a client gets in place of an answer."""

from __future__ import annotations

import json
from typing import Literal

from atropos_core.errors import AtroposError

Category = Literal["user", "server"]


class Refused(Exception):
    """A request that is not carried out. `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.status = status
        self.category: Category = category


def unknown(what: str, id: str) -> Refused:
    return Refused(f"this server has no {what} {id[:200]!r}.", status=404)


def error_body(message: str, category: Category) -> bytes:
    """Return an error in the protocol's form (RequestFailedResponse)."""
    return json.dumps({"error": message, "category": category}).encode()


def said(error: AtroposError) -> str:
    """Return an error's message and its remedy as one text."""
    message = Exception.__str__(error)
    return f"{message} {error.remedy}" if error.remedy else message
