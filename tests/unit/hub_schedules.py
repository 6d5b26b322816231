"""A hub with workers and a trainer in virtual time, each of which dies at random moments, the hub's own process as well.

Hub, sessions and journal are the real ones. Workers send again what was not acknowledged; a trainer begins again from
its last checkpoint, which may be durable before the hub has heard of it.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atropos_core.errors import HubClosed, HubFull, LeaseLost
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, GroupRecord, Label, Limits
from atropos_core.hub.session import Session
from atropos_trajectory_api.journal.store import JournalStore
from tests.unit import virtual_time

GROUP_BYTES = 100
LEASE_DEADLINE_S = 600.0
ENVIRONMENTS = ("long", "short")


@dataclass(frozen=True)
class Saved:
    """A trainer's checkpoint: what its weights were trained on, and which ids the hub may not have heard of."""

    trained: tuple[int, ...] = ()  # numbers of groups
    version: int = 0
    uncommitted: tuple[int, ...] = ()  # ids in the hub


@dataclass
class World:
    luck: random.Random
    folder: Path
    hub: Hub[bytes] = field(init=False)
    store: JournalStore = field(init=False)
    saved: Saved = Saved()
    published: int = 0
    number: int = 0  # of groups that were run
    acknowledged: set[int] = field(default_factory=set)
    dropped: Counter[int] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        luck = self.luck
        self.batch, self.batches = luck.randint(1, 4), luck.randint(2, 8)
        self.staleness = luck.choice([0, 1, 2, None])
        self.limits = Limits(luck.randint(2, 6) * self.batch * GROUP_BYTES)
        self.lease_s = luck.choice([None, 5.0])
        self.save_every = luck.randint(1, 3)
        self.shared = luck.random() < 0.5
        self.crashes = luck.choice([0, 1, 3, 6])
        self.start_hub()

    def start_hub(self) -> None:
        self.store = JournalStore(self.folder, sync="never", segment_bytes=2000)
        self.hub = Hub(
            self.limits,
            max_staleness=self.staleness,
            on_dropped=self.on_dropped,
            store=self.store,
            lease_s=self.lease_s,
            allocation_grace_s=60.0,
            clock=asyncio.get_running_loop().time,
        )
        if self.shared:
            self.hub.share("short", weight=1.0, minimum=0.3)

    def kill_hub(self) -> None:
        self.hub.stop()  # who waits finds the connection gone
        self.store.close()
        self.start_hub()

    def on_dropped(self, entry: GroupRecord[bytes], cause: str) -> None:
        assert cause == "stale"
        self.dropped[int(entry.payload)] += 1

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.luck.choice([0.0, 1.0, 1.0, 10 * self.luck.random()]))

    # -- those who use it

    async def worker(self, environment: str) -> None:
        while True:
            number, self.number = self.number, self.number + 1
            label = Label(environment, 1, GROUP_BYTES, self.published, task=str(number))
            await self.passes(1.0)
            while number not in self.acknowledged:
                try:
                    await self.hub.put(b"%d" % number, label, key=str(number), deadline_s=20.0)
                    assert self.hub.status().held_bytes <= self.limits.size_bytes
                except (HubClosed, HubFull):
                    await asyncio.sleep(0.5)
                    continue
                await self.passes(0.1)
                if self.luck.random() < 0.1:
                    self.happened["answer lost"] += 1
                    continue
                self.acknowledged.add(number)

    async def trainer(self) -> None:
        saved = self.saved
        hub = self.hub
        session = hub.open("trainer", committed=saved.uncommitted)
        self.saved = saved = replace(saved, uncommitted=())  # the hub has answered
        renewing = asyncio.ensure_future(self.renews(hub, session))
        try:
            await self.train(hub, session, saved)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def renews(self, hub: Hub[bytes], session: Session[bytes]) -> None:
        """Now and then a message is late, and the session over."""
        while hub is self.hub and not session.ended:
            session.renew()
            await asyncio.sleep(8.0 if self.luck.random() < 0.02 else 1.0)

    async def train(self, hub: Hub[bytes], session: Session[bytes], saved: Saved) -> None:
        trained, ids, version = list(saved.trained), list[int](), saved.version
        self.published = version
        while version < self.batches:
            entries = await session.lease(BatchSize(groups=self.batch), version, LEASE_DEADLINE_S)
            oldest = min(entry.label.oldest_version or 0 for entry in entries)
            assert self.staleness is None or version - oldest <= self.staleness, "a token is older than the bound"
            assert len(entries) == self.batch
            await self.passes(1.0)
            self.reach(hub)
            session.trained([entry.id for entry in entries])
            trained += [int(entry.payload) for entry in entries]
            ids += [entry.id for entry in entries]
            version += 1
            await self.passes(0.2)
            self.published = version
            if version % self.save_every == 0 or version == self.batches or session.commit_due:
                await self.passes(1.0)
                self.saved = Saved(tuple(trained), version, tuple(ids))
                await self.passes(0.2)
                self.reach(hub)
                session.commit(ids)
                self.saved, ids = replace(self.saved, uncommitted=()), []

    def reach(self, hub: Hub[bytes]) -> None:
        """Raises HubClosed where its process is another one now."""
        if hub is not self.hub:
            raise HubClosed("the hub's process died")

    # -- one schedule

    async def live(self) -> None:
        self.workers = [asyncio.ensure_future(self.worker(name)) for name in ENVIRONMENTS * 2]
        clock = asyncio.ensure_future(self.ticks())
        until = [self.luck.random() * 4 * self.batches for _ in range(self.crashes)]
        killers = [asyncio.ensure_future(self.dies_at(moment)) for moment in until]
        try:
            while self.saved.version < self.batches:
                self.training = asyncio.ensure_future(self.trainer())
                try:
                    await self.training
                except (LeaseLost, HubClosed, asyncio.CancelledError) as error:
                    self.happened[type(error).__name__] += 1
            if self.saved.uncommitted:  # it died between its last checkpoint and the hub's answer
                self.hub.open("trainer", committed=self.saved.uncommitted)
        finally:
            for task in (clock, *killers, *self.workers):
                task.cancel()
            ended = await asyncio.gather(clock, *killers, *self.workers, return_exceptions=True)
            self.hub.stop()
            self.store.close()
        for one in ended:
            if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError):
                raise one

    async def ticks(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.hub.tick()

    async def dies_at(self, moment: float) -> None:
        await asyncio.sleep(moment)
        what = self.luck.choice(("hub", "trainer", "worker"))
        self.happened[f"{what} died"] += 1
        if what == "hub":
            self.kill_hub()
        elif what == "trainer":
            self.training.cancel()
        else:
            at = self.luck.randrange(len(self.workers))
            self.workers[at].cancel()
            self.workers[at] = asyncio.ensure_future(self.worker(ENVIRONMENTS[at % len(ENVIRONMENTS)]))

    def check(self) -> None:
        trained = Counter(self.saved.trained)
        assert len(self.saved.trained) == self.batches * self.batch
        assert max(trained.values()) == 1, "trained twice"
        assert max(self.dropped.values(), default=1) == 1
        waiting = Counter(int(label.task) for _, label in self.hub.labels())
        ends = trained + self.dropped + waiting
        assert max(ends.values()) == 1, "trained, and dropped or still to be trained"
        assert self.acknowledged <= ends.keys(), "acknowledged, and lost"


def run_schedule(seed: int) -> Counter[str]:
    """One schedule, with all checks. What happened in it."""

    async def main(folder: Path) -> Counter[str]:
        world = World(random.Random(seed), folder)
        await world.live()
        world.check()
        world.happened.update(schedules=1, stale=sum(world.dropped.values()), finished=world.number)
        return world.happened

    made: Callable[[Path], Coroutine[Any, Any, Counter[str]]] = main
    with tempfile.TemporaryDirectory() as folder:
        return virtual_time.run(made(Path(folder)))
