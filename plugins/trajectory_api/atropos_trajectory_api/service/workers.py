"""The environment workers that have registered: what they run, and whether they are still there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_core.errors import DataError, TokenizerMismatch
from atropos_core.group_schema import MOST_CHARACTERS, NUMBER_BOUND, brief
from atropos_trajectory_api.misspelt import refuse_misspelt

FIELDS = (
    "name", "environment", "tasks", "weight", "minimum", "group_size", "tokenizer", "vocabulary", "digest", "playing",
)  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """The trained model, as far as its workers must know it."""

    tokenizer: str = ""  # fingerprint, see atropos_core.rollouts.tokenizer; empty: unknown
    vocabulary: int = 0  # 0: unknown
    model: str = ""
    date: str = ""  # the date for its chat template; empty: unknown

    def refuse_other(self, name: str, tokenizer: str, vocabulary: int) -> None:
        """Raise TokenizerMismatch unless a worker's tokenizer is the policy's."""
        if self.tokenizer and tokenizer and tokenizer != self.tokenizer:
            raise TokenizerMismatch(
                f"worker {name!r} has a tokenizer with fingerprint {tokenizer}, but the policy's is {self.tokenizer}: "
                "the ids that it would send mean something else.",
                remedy=f"Give the worker the policy's own model directory ({self.model or 'ask the trainer'}).",
            )
        if self.vocabulary and vocabulary > self.vocabulary:
            raise TokenizerMismatch(
                f"worker {name!r} has a vocabulary of {vocabulary}, but the policy's has {self.vocabulary}.",
                remedy=f"Give the worker the policy's own model directory ({self.model or 'ask the trainer'}).",
            )


@dataclass
class WorkerState:
    """One worker. `seen` and the like change; what it registered with does not."""

    id: str
    name: str
    environment: str
    tasks: int
    weight: float
    minimum: float
    group_size: int
    tokenizer: str
    vocabulary: int
    digest: str
    seen: float
    draining: bool = False
    running: set[int] = field(default_factory=set)
    groups: int = 0


class Workers:
    """Workers by id. An id is valid for one process of the server: an unknown worker registers again."""

    def __init__(self, clock: Callable[[], float], silent_s: float) -> None:
        self._clock = clock
        self._silent_s = silent_s
        self._workers: dict[str, WorkerState] = {}

    def register(self, wanted: Mapping[str, Any]) -> WorkerState:
        """Add a worker. Raises DataError if this is not a registration."""
        refuse_misspelt(wanted, FIELDS)
        worker = WorkerState(
            secrets.token_hex(8),
            name=_given(wanted, "name", str),
            environment=_given(wanted, "environment", str),
            tasks=_given(wanted, "tasks", int, 0),
            weight=_share(wanted, "weight", 1.0, 1e9),
            minimum=_share(wanted, "minimum", 0.0, 1.0),
            group_size=_given(wanted, "group_size", int, 0),
            tokenizer=_given(wanted, "tokenizer", str, ""),
            vocabulary=_given(wanted, "vocabulary", int, 0),
            digest=_given(wanted, "digest", str, ""),
            seen=self._clock(),
            running=numbers(wanted.get("playing", ())),
        )
        if not worker.weight:
            raise DataError(f"worker {worker.name!r}: its weight cannot be 0", remedy="A weight is above 0.")
        self._workers[worker.id] = worker
        return worker

    def find(self, number: str) -> WorkerState | None:
        """Seen now."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.seen = self._clock()
        return worker

    def forget(self, number: str) -> WorkerState | None:
        return self._workers.pop(number, None)

    def all(self) -> Collection[WorkerState]:
        return self._workers.values()

    def silent(self) -> list[WorkerState]:
        """Workers that have been silent for too long."""
        since = self._clock() - self._silent_s
        return [worker for worker in self._workers.values() if worker.seen < since]

    def running(self) -> dict[int, str]:
        """Draw -> the worker that reports it as running."""
        return {number: worker.id for worker in self._workers.values() for number in worker.running}

    def environments(self) -> dict[str, dict[str, Any]]:
        """Return what can be run now: tasks, weight, how many workers are not leaving, and the digests of their tasks."""
        found: dict[str, dict[str, Any]] = {}
        for worker in self._workers.values():
            entry = found.setdefault(
                worker.environment, {"tasks": worker.tasks, "weight": worker.weight, "workers": 0, "digests": []}
            )
            entry["tasks"] = max(entry["tasks"], worker.tasks)
            entry["workers"] += not worker.draining
            if worker.digest and not worker.draining and worker.digest not in entry["digests"]:
                entry["digests"].append(worker.digest)
        return found

    def has(self, environment: str) -> bool:
        return any(worker.environment == environment for worker in self._workers.values())


def numbers(given: Any) -> set[int]:
    """A list of ids from outside. Raises DataError."""
    if not isinstance(given, (list, tuple)) or not all(
        type(one) is int and -NUMBER_BOUND <= one < NUMBER_BOUND for one in given
    ):
        raise DataError("a list of ids holds another value", remedy="Send whole numbers of 64 bits.")
    return set(given)


def _share(wanted: Mapping[str, Any], key: str, default: float, most: float) -> float:
    """A number, compared before it is made a float, since a body may have integers with any number of digits."""
    value = _given(wanted, key, (int, float), default)
    if not 0 <= value <= most:
        raise DataError(
            f"{key!r} is {brief(value)}, which is not allowed",
            remedy="A weight is above 0 and at most 1e9, a minimum is a share of the batch from 0 to 1.",
        )
    return float(value)


def _given(wanted: Mapping[str, Any], key: str, kind: Any, default: Any = None) -> Any:
    value = wanted.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted_type = "text" if kind is str else "a whole number" if kind is int else "a number"
        raise DataError(f"{key!r} is {brief(value)}, which is not allowed", remedy=f"Send {wanted_type}.")
    if kind is int and not 0 <= value < 1 << 62:
        raise DataError(f"{key!r} is {brief(value)}, which is not allowed", remedy="Send a whole number from 0 on.")
    if kind is str and len(value) > MOST_CHARACTERS:
        raise DataError(
            f"{key!r} has {len(value)} characters, more than {MOST_CHARACTERS}", remedy="Send a shorter text."
        )
    return value
