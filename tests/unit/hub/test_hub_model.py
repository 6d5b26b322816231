"""A stateful property test: the hub, in memory and on a journal that is reopened at will, against a dictionary."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atropos_core.errors import DataError, DeadlineExceeded, HubFull, LeaseLost
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, GroupRecord, Label, Limits
from atropos_trajectory_api.journal.store import JournalStore
from tests.unit.hubs import Clock, settle

ROOM = 1000
LEASE_S = 10.0
STALENESS = 1


@dataclass
class Group:
    """What the model knows of one that was acknowledged."""

    payload: bytes
    label: Label
    state: str = "waiting"


class HubModel(RuleBasedStateMachine):
    """Ids rise, so order is the order of ids. `groups` is all that the hub keeps."""

    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory() if self.on_disk else None
        self.clock = Clock()
        self.store: JournalStore | None = None
        self.dropped: list[int] = []
        self.hub = self.made()
        self.session = self.hub.open("trainer")
        self.groups: dict[int, Group] = {}
        self.keys: dict[str, int] = {}
        self.version = self.number = self.committed = 0
        self.unmet: int | None = None
        self.waiting: dict[asyncio.Task[int], tuple[bytes, Label]] = {}  # in the order of their coming

    def made(self) -> Hub[bytes]:
        if self.directory is not None:
            self.store = JournalStore(Path(self.directory.name), sync="never", segment_bytes=1500)
        return Hub(
            Limits(ROOM),
            max_staleness=STALENESS,
            on_dropped=self.on_dropped,
            store=self.store,
            lease_s=LEASE_S,
            clock=self.clock,
        )

    def on_dropped(self, entry: GroupRecord[bytes], cause: str) -> None:
        assert cause == "stale"
        if entry.id not in self.groups:  # it came in for one that was dropped, and is as old
            assert (entry.payload, entry.label) in self.waiting.values()
            assert self.version - (entry.label.oldest_version or 0) > STALENESS
            self.groups[entry.id] = Group(entry.payload, entry.label, "stale")
        assert entry.payload == self.groups[entry.id].payload
        self.dropped.append(entry.id)

    def run(self, work: Callable[[], Awaitable[Any]] | None = None) -> Any:
        """Do it, let everyone go on, and learn which of the puts that waited were taken."""

        async def both() -> Any:
            try:
                return await work() if work else None
            finally:
                await settle()

        try:
            return self.loop.run_until_complete(both())
        finally:
            taken = {task.result(): what for task, what in self.waiting.items() if task.done() and not task.cancelled()}
            self.waiting = {task: what for task, what in self.waiting.items() if not task.done()}
            for id, (payload, label) in sorted(taken.items()):
                self.groups.setdefault(id, Group(payload, label))

    def of(self, *states: str) -> list[int]:
        return [id for id, group in sorted(self.groups.items()) if group.state in states]

    def size_kept(self, environment: str | None = None) -> int:
        return sum(one.label.size_bytes for one in self.groups.values() if environment in (None, one.label.environment))

    def new(self, environment: str, size: int, behind: int) -> tuple[bytes, Label]:
        self.number += 1
        payload = b"%d " % self.number + bytes(size)
        return payload, Label(environment, 1, len(payload), max(self.version - behind, 0))

    def let_in(self, label: Label) -> bool:
        """The rule of the last quarter, which a trainer that lacks groups suspends."""
        known = {one.label.environment for one in self.groups.values()} | {
            label.environment for _, label in self.waiting.values()
        }
        if len(known) < 2 or (self.unmet is not None and len(self.of("waiting")) < self.unmet):
            return True
        share = ROOM / len(known | {label.environment})
        return self.size_kept() + label.size_bytes <= 0.75 * ROOM or self.size_kept(label.environment) < share

    def fits(self, label: Label) -> bool:
        return self.size_kept() + label.size_bytes <= ROOM

    # -- producers

    @rule(
        environment=st.sampled_from("ab"),
        size=st.integers(0, 400),
        behind=st.integers(0, 2),
        key=st.sampled_from([None, "x", "y"]),
    )
    def try_put(self, environment: str, size: int, behind: int, key: str | None) -> None:
        payload, label = self.new(environment, size, behind)
        before, expected = dict(self.groups), self.fits(label) and self.let_in(label) and not self.waiting
        id = self.hub.try_put(payload, label, key=key)
        if key in self.keys:
            assert id == self.keys[key]
        elif id is not None:
            assert id not in before
            assert self.fits(label)
            self.groups[id] = Group(payload, label)
            if key:
                self.keys[key] = id
        if key not in self.keys and not self.waiting:
            assert (id is not None) == expected
        self.run()

    @rule(environment=st.sampled_from("ab"), size=st.integers(0, 400), behind=st.integers(0, 2))
    def put(self, environment: str, size: int, behind: int) -> None:
        payload, label = self.new(environment, size, behind)

        async def start() -> None:
            self.waiting[asyncio.ensure_future(self.hub.put(payload, label))] = payload, label

        self.run(start)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_producer_gives_up(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(list(self.waiting))).cancel()
        self.run()

    @rule()
    def a_group_larger_than_the_hub_is_refused(self) -> None:
        with pytest.raises(DataError):
            self.hub.try_put(b"", Label("a", 1, ROOM + 1))

    # -- the trainer

    @rule(n=st.integers(1, 4), waits=st.booleans())
    def lease(self, n: int, waits: bool) -> None:
        for id in self.of("waiting"):
            if self.version - (self.groups[id].label.oldest_version or 0) > STALENESS:
                self.expect_dropped(id)
        entries: list[GroupRecord[bytes]] | None
        if waits:
            try:
                entries = self.run(lambda: self.session.lease(BatchSize(groups=n), self.version, 0))
            except (DeadlineExceeded, HubFull):
                entries = None
        else:
            entries = self.session.try_lease(BatchSize(groups=n), self.version)
            self.run()  # who came in for what was dropped may be part of it
        self.forget_dropped()
        self.unmet = None if entries is not None else n
        if entries is not None:
            expected = self.of("waiting")[:n]
            assert [entry.id for entry in entries] == expected, "oldest first"
            assert [entry.payload for entry in entries] == [self.groups[id].payload for id in expected]
            for id in expected:
                self.groups[id].state = "leased"
        self.run()
        if entries is None:
            assert len(self.of("waiting")) < n
            assert not any(self.fits(label) for _, label in self.waiting.values()), "a group kept it from the trainer"

    def expect_dropped(self, id: int) -> None:
        self.groups[id].state = "stale"

    def forget_dropped(self) -> None:
        assert sorted(self.dropped) == self.of("stale")
        for id in self.dropped:
            del self.groups[id]
        self.dropped.clear()

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.of("leased", "waiting") or [99999]), unique=True))
        self.session.give_back(chosen)
        for id in chosen:
            if id in self.groups:
                self.groups[id].state = "waiting"
        self.run()

    @precondition(lambda self: self.of("leased"))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.of("leased", "trained")), unique=True))
        self.session.trained(chosen)
        for id in chosen:
            self.groups[id].state = "trained"
        self.version += 1

    @rule(data=st.data(), everything=st.booleans())
    def commit(self, data: st.DataObject, everything: bool) -> None:
        some = st.lists(st.sampled_from(self.of("trained", "leased") or [99999]))
        chosen = self.of("trained") if everything else data.draw(some)
        settled = {id for id in chosen if id in self.groups}
        assert self.session.commit(None if everything else chosen) == len(settled)
        self.settle(settled)

    def settle(self, ids: set[int]) -> None:
        self.committed += len(ids)
        for id in ids:
            del self.groups[id]
        self.run()

    @rule(data=st.data())
    def another_session(self, data: st.DataObject) -> None:
        in_checkpoint = data.draw(st.lists(st.sampled_from(sorted(self.groups) or [99999]), unique=True))
        before, self.session = self.session, self.hub.open("trainer", in_checkpoint)
        with pytest.raises(LeaseLost):
            before.commit(in_checkpoint)
        self.over()
        self.settle({id for id in in_checkpoint if id in self.groups})

    @rule(seconds=st.sampled_from([1.0, LEASE_S, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.session.renew()
        self.clock.now += seconds
        self.hub.tick()
        if seconds > LEASE_S:
            with pytest.raises(LeaseLost):
                self.session.try_lease(BatchSize(groups=1), self.version)
            self.over()
            self.session = self.hub.open("trainer")
        self.run()

    def over(self) -> None:
        self.unmet = None
        for group in self.groups.values():
            group.state = "waiting"

    @precondition(lambda self: self.on_disk)
    @rule()
    def the_process_dies(self) -> None:
        waiting, self.waiting = self.waiting, {}
        self.hub.stop()  # so that no put is admitted by the end of another
        self.run()
        assert all(task.exception() for task in waiting)
        assert self.store is not None
        self.store.close()  # writes nothing
        self.unmet = None
        self.hub = self.made()
        self.session = self.hub.session(self.session.number)

    # -- always

    @invariant()
    def what_is_held_is_what_the_model_holds(self) -> None:
        assert dict(self.hub.labels()) == {id: group.label for id, group in self.groups.items()}
        assert self.session.holds == {id: self.groups[id].state for id in self.of("leased", "trained")}
        status = self.hub.status()
        assert (len(self.hub), status.leased, status.trained) == tuple(
            len(self.of(state)) for state in ("waiting", "leased", "trained")
        )
        assert status.held_bytes == self.size_kept() <= ROOM
        assert status.committed == self.committed
        assert status.puts_waiting == len(self.waiting)
        assert set(status.environments) == {
            label.environment
            for label in (*(one.label for one in self.groups.values()), *(label for _, label in self.waiting.values()))
        }

    @invariant()
    def nobody_waits_who_could_come_in(self) -> None:
        heads: dict[str, Label] = {}
        for _, label in self.waiting.values():
            heads.setdefault(label.environment, label)
        allowed = [label for label in heads.values() if self.let_in(label)]
        if allowed:
            least = min(self.size_kept(label.environment) for label in allowed)
            first = [label for label in allowed if self.size_kept(label.environment) == least]
            assert any(not self.fits(label) for label in first)

    @invariant()
    def the_disk_is_bounded(self) -> None:
        if self.store:
            assert self.store.size_bytes <= 2 * self.store.live_bytes + 2 * (1500 + 600)

    def teardown(self) -> None:
        self.hub.stop()
        self.loop.run_until_complete(settle())
        assert all(task.done() for task in self.waiting), "closing lets everyone go"
        for task in self.waiting:
            task.exception()
        self.loop.close()
        if self.store:
            self.store.close()
        if self.directory is not None:
            self.directory.cleanup()


class HubOnDiskModel(HubModel):
    """The same, and it may die at any time."""

    on_disk = True


HubModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
HubOnDiskModel.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_the_hub_behaves_as_its_model = HubModel.TestCase
test_the_hub_on_its_journal_behaves_as_its_model = HubOnDiskModel.TestCase
