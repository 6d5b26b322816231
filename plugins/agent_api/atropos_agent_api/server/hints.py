"""Headers in which clients say where a call comes from. They are only hints: a client may say anything, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

MOST_CHARACTERS = 200
_CODEX = b"x-codex-turn-metadata"
_SESSIONS = (b"session-id", b"x-session-id", b"session_id", b"x-claude-code-session-id", b"thread-id")


def hints_of(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """As Call.hints."""
    hints: dict[str, str] = {}
    for name, value in headers:
        if name == b"x-stainless-retry-count":
            if value != b"0":
                hints["retry"] = _text(value)
        elif name in _SESSIONS:
            hints.setdefault("session", _text(value))
        elif name == _CODEX:
            hints |= _of_codex(value)
    return hints


def _of_codex(value: bytes) -> dict[str, str]:
    try:
        said: Any = orjson.loads(value)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(said, dict):
        return {}
    given = {"agent": said.get("agent_name"), "kind": said.get("request_kind")}
    return {name: text[:MOST_CHARACTERS] for name, text in given.items() if isinstance(text, str) and text}


def _text(value: bytes) -> str:
    return value.decode("latin-1")[:MOST_CHARACTERS]
