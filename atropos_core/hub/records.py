"""Records of groups in the hub, limits and sizes of batches, and the figures of its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from atropos_core.errors import DataError
from atropos_core.types import ScoredGroup

T = TypeVar("T")
State = Literal["waiting", "leased", "trained"]


@dataclass(frozen=True, slots=True)
class Label:
    """Everything that the hub knows of a payload."""

    environment: str
    sequences: int
    size_bytes: int
    oldest_version: int | None = None  # None: unknown, never stale
    draw: int | None = None  # None: no curriculum drew it
    task: str = ""

    @classmethod
    def of(cls, group: ScoredGroup, size_bytes: int | None = None) -> Label:
        """`size_bytes` is the size of the payload if that is not the group itself."""
        drawn = group.draw
        return cls(
            environment=drawn.environment,
            sequences=sum(len(episode.rollouts) for episode in group.episodes),
            size_bytes=group.size_bytes if size_bytes is None else size_bytes,
            oldest_version=group.oldest_version,
            draw=drawn.id if drawn.id >= 0 else None,
            task=group.task.id,
        )


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a batch, in either groups or sequences. `sequences` is met exactly with whole groups if possible; if the waiting
    sizes can never add up to it, the largest smaller sum is given."""

    groups: int | None = None
    sequences: int | None = None

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.sequences is None) or self.number < 1:
            raise DataError(f"a batch is one or more groups, or one or more sequences; requested was {self!r}")

    @property
    def number(self) -> int:
        return self.groups or self.sequences or 0

    def of(self, label: Label) -> int:
        """Return how much of this size a payload contributes."""
        return 1 if self.groups else label.sequences

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.groups else f"{self.sequences} sequences"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on everything in the hub: waiting, leased, and trained but not committed."""

    size_bytes: int
    sequences: int | None = None
    size_option: str = "hub.size_mb"  # what raises each of them: errors name it
    sequences_option: str = "the bound of sequences"


@dataclass(slots=True)
class GroupRecord(Generic[T]):
    """One group in the hub. Callers that lease it, or learn that it was dropped, get a copy with the payload."""

    id: int
    payload: T  # None in the hub's own record while only the store has it, and in a copy if that is damaged
    label: Label
    since: float  # of the hub's clock: when it was put
    state: State = "waiting"
    waited_s: float = 0.0  # from then to the copy


@dataclass(frozen=True, slots=True)
class EnvironmentStatus:
    """One environment in the hub's status. The first three fields count waiting groups."""

    groups: int
    sequences: int
    size_bytes: int
    held_bytes: int
    puts_waiting: int
    weight: float
    minimum: float


@dataclass(frozen=True, slots=True)
class HubStatus:
    """The hub's figures. The first three fields count groups that wait to be leased."""

    groups: int
    sequences: int
    size_bytes: int
    leased: int
    trained: int  # not committed yet
    committed: int
    held_bytes: int
    held_sequences: int
    limits: Limits
    puts_waiting: int
    oldest_s: float | None  # how long the oldest group has waited
    environments: Mapping[str, EnvironmentStatus] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause
    why: str | None = None  # no batch can be formed now


@dataclass(frozen=True, slots=True)
class Restored(Generic[T]):
    """The content of a store: `records` in the order of ids, without payloads in memory."""

    records: Sequence[GroupRecord[T]]
    keys: Sequence[tuple[bytes, int]]
    next_id: int
    committed: int
    session: int  # the number of the last one
    holder: str | None  # None if that session had ended


class Store(Protocol[T]):
    """Storage that the hub writes before it acts. All methods but `read` may raise StoreFull, and then have changed nothing."""

    def restored(self, now: float) -> Restored[T]: ...
    def put(self, id: int, payload: T, label: Label, key: bytes | None) -> None: ...
    def read(self, id: int) -> T: ...  # raises DataError if it is damaged
    def mark(self, ids: Sequence[int], state: State) -> None: ...
    def settle(self, ids: Sequence[int], *, committed: bool) -> None: ...  # they are never served again
    def session(self, number: int, holder: str | None) -> None: ...  # nothing is leased or trained after it
    async def written(self) -> None: ...  # once what was put so far is as durable as configured
