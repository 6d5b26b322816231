"""What the tests of the hub share: labels of known content, a clock that they turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from atropos_core.hub.hub import Hub
from atropos_core.hub.records import GroupRecord, Label, Limits
from atropos_core.hub.session import Session


class Clock:
    """Seconds as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def label(environment: str = "words", sequences: int = 1, size_bytes: int = 100, version: int | None = None) -> Label:
    return Label(environment, sequences, size_bytes, version)


def hub(size_bytes: int = 1_000_000, *, sequences: int | None = None, max_staleness: int | None = 0, **more: Any) -> Hub[str]:  # fmt: skip
    dropped = more.pop("dropped", [])
    return Hub(
        Limits(size_bytes, sequences),
        max_staleness=max_staleness,
        on_dropped=lambda entry, cause: dropped.append((entry.payload, cause)),
        **more,
    )


def opened(size_bytes: int = 1_000_000, **more: Any) -> tuple[Hub[str], Session[str]]:
    one = hub(size_bytes, **more)
    return one, one.open("trainer")


def payloads(entries: Iterable[GroupRecord[str]]) -> list[str]:
    return [entry.payload for entry in entries]


def ids(entries: Iterable[GroupRecord[Any]]) -> list[int]:
    return [entry.id for entry in entries]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
