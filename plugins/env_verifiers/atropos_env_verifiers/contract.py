"""The interface to both of verifiers' contracts, for the process that hosts an environment."""

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
    """The address and key with which one agent of an episode samples."""

    url: str
    key: str


@dataclass
class Outcome:
    """How an episode ended. `agent`: the agent whose tokens are trained; `error`: why the episode failed."""

    score: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # of the score, by function: its value times its weight
    metrics: dict[str, float] = field(default_factory=dict)
    agent: str = ""
    error: str = ""
    turns: list[float] | None = (
        None  # the reward of each step, if the environment gave any before the episode was scored
    )

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Contract(Protocol):
    """One loaded environment."""

    @property
    def name(self) -> str:
        """Of the contract."""

    @property
    def agents(self) -> Sequence[str]:
        """The agents that sample from the policy, trained or not."""

    async def open(self, at_most: int) -> Mapping[Part, Sequence[Sequence[Mapping[str, Any]]]]:
        """The opening messages of the first `at_most` tasks of each data set."""

    async def run(self, part: Part, index: int, accesses: Sequence[Mapping[str, Access]]) -> list[Outcome]:
        """Run a group: one episode of that task for each entry of `accesses`, which holds its agents' accesses by name."""

    async def close(self) -> None: ...


def numbers(given: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Keep those that are finite numbers."""
    return {name: float(value) for name, value in given if isinstance(value, (int, float)) and math.isfinite(value)}


def plain(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a task holds them: without fields that are None, and with content as text."""
    made = []
    for message in messages:
        said = {name: value for name, value in message.items() if value is not None}
        content = said.get("content", "")
        if not isinstance(content, str):
            content = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
        made.append({**said, "content": content})
    return made


def digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """A digest of a task's opening messages, to tell whether two tasks are the same."""
    return blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=16).hexdigest()
