"""What both of verifiers' contracts are to the process that hosts an environment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

Part = Literal["train", "eval"]  # of an environment's own data sets


@dataclass(frozen=True)
class Access:
    """Where one agent of an episode samples."""

    url: str
    key: str


@dataclass
class Outcome:
    """How an episode ended. `agent`: the one whose tokens are trained; `error`: why it counts as failed."""

    score: float = 0.0
    parts: dict[str, float] = field(
        default_factory=dict
    )  # of the score, by the function that gave it, times its weight
    metrics: dict[str, float] = field(default_factory=dict)
    agent: str = ""
    error: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Contract(Protocol):
    """One environment that is loaded."""

    @property
    def name(self) -> str:
        """Of the contract."""

    @property
    def agents(self) -> Sequence[str]:
        """Those that sample from the policy, trained or not."""

    async def open(self, at_most: int) -> Mapping[Part, Sequence[Sequence[Mapping[str, Any]]]]:
        """The opening messages of each of its tasks, of the first ones of each data set."""

    async def run(self, part: Part, index: int, accesses: Sequence[Mapping[str, Access]]) -> list[Outcome]:
        """A group: as many episodes of that task as there are accesses, by agent."""

    async def close(self) -> None: ...


def numbers(given: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Those that are finite numbers."""
    return {name: float(value) for name, value in given if isinstance(value, (int, float)) and math.isfinite(value)}


def plain(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a task has them: without fields that are None, content as text."""
    made = []
    for message in messages:
        said = {name: value for name, value in message.items() if value is not None}
        content = said.get("content", "")
        if not isinstance(content, str):
            content = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
        made.append({**said, "content": content})
    return made


def digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Of a task's opening messages: it says whether two are the same."""
    return blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).hexdigest()
