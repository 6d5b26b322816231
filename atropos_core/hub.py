"""The hub: scored groups between those that play and the one that trains.

Bounded, first in first out within an environment, fair between environments, leased, aware of policy versions. A
group's life: `put` (waits while the hub is full), `lease`, then `give_back` or `trained` (its update is in the
trainer's memory), and `commit` once a durable checkpoint holds the update: it is never served again. One session at a
time leases; a session that is opened, or that is silent for `lease_s`, ends the one before, and whatever that one had
not committed waits again. With a store, all of this outlives the process. Ids and the numbers of sessions mean
something in this hub only, and after the process only with the store: another begins with the same ones.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar, cast

from atropos_core import console, hub_report
from atropos_core.choosing import Chooser
from atropos_core.errors import DataError, HubClosed, LeaseLost, StoreFull
from atropos_core.held import Entry, EnvironmentStatus, Held, HubStatus, Label, Limits, Store, Want
from atropos_core.session import RESUME, LeaseRequest, Session
from atropos_core.shares import Lane, Lanes, Offer

__all__ = ["Entry", "EnvironmentStatus", "Hub", "HubStatus", "Label", "Limits", "Session", "Store", "Want"]

T = TypeVar("T")
KEYS = 100_000  # groups whose idempotency keys are remembered


class Hub(Generic[T]):
    """All decisions are synchronous; `put` and `lease` only add the waiting. `on_dropped` is told of groups that no
    trainer will see, with the cause: "stale", what a session dropped them for, or "damaged" on the disk, then with the
    payload None. Without `keep_trained` a group is let go once it is trained, for a trainer that plays its draws again
    where it dies before the commit."""

    def __init__(
        self,
        limits: Limits,
        *,
        max_staleness: int | None,
        on_dropped: Callable[[Entry[T], str], None],
        store: Store[T] | None = None,
        lease_s: float | None = None,
        allocation_grace_s: float = 30.0,
        keep_trained: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.max_staleness = max_staleness
        self.lease_s = lease_s
        self.dropped: Counter[str] = Counter()
        self.current: Session[T] | None = None  # the session that may lease now
        self._on_dropped = on_dropped
        self._store = store
        self._keep_trained = keep_trained
        self._clock = clock
        self._lanes: Lanes[T] = Lanes(limits)
        self._chooser = Chooser(self._lanes, allocation_grace_s, clock)
        self._held: dict[int, Held[T]] = {}
        self._out: dict[int, Held[T]] = {}  # leased or trained, by the current session
        self._let_go: set[int] = set()  # trained, not committed, not kept
        self._trained_bytes = self._trained_sequences = self._trained_groups = 0
        self._by_version: list[tuple[int, int]] = []  # heap of (oldest version, id) of what waits or waited
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._next = self._sessions = self._committed = 0
        self._offers = 0
        self._offered: dict[bytes, asyncio.Future[int]] = {}  # those with a key
        self._requests: deque[LeaseRequest[T]] = deque()
        self._unmet: Want | None = None  # the last batch that could not be formed
        self._closed = False
        if store:
            self._restore(store)

    def __len__(self) -> int:
        """Groups that wait to be leased."""
        return self._lanes.waiting

    # -- environments

    def share(self, environment: str, *, weight: float = 1.0, minimum: float = 0.0) -> None:
        """Register an environment: `weight` is its part of the batches beside the others' weights, `minimum` the part
        of every batch (0 to 1) that is its own while it has groups."""
        hub_report.check_name(environment)
        if not (weight > 0 and 0 <= minimum <= 1):
            raise DataError(
                f"environment {environment!r} asks for weight {weight!r} and minimum {minimum!r} of the batches.",
                remedy="A weight is above 0, a minimum is a part from 0 to 1.",
            )
        self._lanes.register(environment, weight, minimum, self._clock())
        self._proceed()

    def forget(self, environment: str) -> None:
        """It is no longer registered. What it has sent stays."""
        self._lanes.forget(environment)
        self._proceed()

    # -- in

    def knows(self, key: str) -> bool:
        """Whether a group came under this key, among the last 100,000."""
        return _digest(key) in self._keys

    def labels(self) -> Iterator[tuple[int, Label]]:
        """Of all that is held, by id."""
        return ((held.id, held.label) for held in self._held.values())

    def admits(self, label: Label) -> bool:
        """Whether a put would be taken now."""
        hub_report.check_fits(self.limits, label)
        if not self._lanes.fits(label):
            return False
        if self._starving:
            return True
        if self._offers:
            lane = self._lanes.by_name.get(label.environment)
            if (lane is not None and lane.offers) or self._is_stuck():
                return False
        return self._lanes.may_take(label)

    def try_put(self, payload: T, label: Label, *, key: str | None = None) -> int | None:
        """The group's id, or None where there is no room now. A key seen before returns the former id."""
        self._refuse_when_closed()
        digest = _digest(key)
        if digest is not None and digest in self._keys:
            return self._keys[digest]
        if not self.admits(label):
            return None
        taken = self._admit(payload, label, digest)
        if self._requests:
            self._proceed()
        return taken

    async def put(self, payload: T, label: Label, *, key: str | None = None, deadline_s: float | None = None) -> int:
        """The group's id, once it is held and written. A key seen before returns the former id and stores nothing.
        Raises HubFull at the deadline, StoreFull on a full disk, DataError for what could never fit, HubClosed."""
        taken = self.try_put(payload, label, key=key)
        if taken is None:
            taken = await self._put_later(payload, label, key, deadline_s)
        if self._store:
            await self._store.written()
        return taken

    async def _put_later(self, payload: T, label: Label, key: str | None, deadline_s: float | None) -> int:
        """There is no room for it now."""
        digest, loop = _digest(key), asyncio.get_running_loop()
        end = None if deadline_s is None else loop.time() + deadline_s
        while True:
            left = None if end is None else max(end - loop.time(), 0.0)
            twin = self._offered.get(digest) if digest else None
            if twin is None:
                return await self._wait_for_room(payload, label, digest, left)
            await asyncio.wait([twin], timeout=left)
            if not twin.done():
                raise hub_report.full(self, label)
            if (taken := self.try_put(payload, label, key=key)) is not None:
                return taken

    async def _wait_for_room(self, payload: T, label: Label, key: bytes | None, timeout_s: float | None) -> int:
        now = self._clock()
        lane = self._lanes.lane(label.environment, now)
        lane.last_put, lane.silent = now, False
        offer = Offer(payload, label, key, asyncio.get_running_loop().create_future())
        lane.offers.append(offer)
        self._offers += 1
        if key:
            self._offered[key] = offer.answer
        if len(lane.offers) == 1:  # behind another nothing has become possible
            self._proceed()
        try:
            await asyncio.wait([offer.answer], timeout=timeout_s)
            if offer.answer.done():
                return offer.answer.result()
            raise hub_report.full(self, label)
        finally:
            if key:
                del self._offered[key]
            if not offer.answer.done():
                offer.answer.cancel()
                lane.offers.remove(offer)
                self._offers -= 1
                self._lanes.tidy(lane)
                self._proceed()

    def _admit(self, payload: T, label: Label, key: bytes | None) -> int:
        if self._store:
            self._store.put(self._next, payload, label, key)
        now = self._clock()
        held = Held(self._next, payload, label, now)
        self._next += 1
        self._lanes.take_room(label, now)
        lane = self._lanes.enqueue(held)
        lane.last_put, lane.silent = now, False
        self._held[held.id] = held
        self._watch_version(held)
        if key is not None:
            self._keys[key] = held.id
            if len(self._keys) > KEYS:
                self._keys.popitem(last=False)
        return held.id

    def _admit_offers(self) -> bool:
        """Let in who waits for room: the environment that holds least of its share first; its oldest group is never
        passed by because it is large."""
        admitted = False
        while self._offers:
            for lane in self._lanes.offering():
                offer = lane.offers[0]
                if not (self._starving or self._lanes.may_take(offer.label)):
                    continue
                if not self._lanes.fits(offer.label):
                    return admitted
                self._let_in(lane, offer)
                admitted = True
                break
            else:
                return admitted
        return admitted

    def _let_in(self, lane: Lane[T], offer: Offer[T]) -> None:
        lane.offers.remove(offer)
        self._offers -= 1
        try:
            offer.answer.set_result(self._admit(offer.payload, offer.label, offer.key))
        except StoreFull as error:
            offer.answer.set_exception(error)

    def _let_past(self) -> bool:
        """Let in from behind and beside a group that does not fit, until a batch is there: what the trainer lacks must
        not wait for room that only the trainer can make."""
        admitted = False
        if self._starving and self._is_stuck():
            for lane in self._lanes.offering():
                for offer in list(lane.offers):
                    if self._starving and self._lanes.fits(offer.label):
                        self._let_in(lane, offer)
                        admitted = True
        return admitted

    # -- out

    def open(self, holder: str, committed: Iterable[int] = ()) -> Session[T]:
        """A new session. The one before is over; of what it leased and trained, the groups named in `committed` (they
        are in the opener's checkpoint) are settled and the others wait again."""
        self._refuse_when_closed()
        self._settle([held for id in committed if (held := self._held.get(id)) is not None])
        if self._store:
            self._store.session(self._sessions + 1, holder)
        self._end_session(f"session {self._sessions + 1} was opened by {holder!r}")
        self._sessions += 1
        self.current = Session(self, self._sessions, holder, self._clock())
        self._proceed()
        return self.current

    def session(self, number: int) -> Session[T]:
        """The session of that number. Raises LeaseLost where it is over."""
        self.tick()
        if self.current is None or self.current.number != number:
            cause = f"session {self._sessions} was opened"
            if number == self._sessions:
                cause = "it was silent for too long"
            elif number > self._sessions:
                cause = f"it is none of this hub, which has opened {self._sessions}"
            raise LeaseLost(f"session {number} is over: {cause}.", remedy=RESUME)
        return self.current

    def tick(self) -> None:
        """End the session whose lease ran out. To be called about once a second where there is a `lease_s`."""
        current = self.current
        if current and self.lease_s is not None and self._clock() - current.renewed > self.lease_s:
            self._over(current, f"it was not renewed for {self.lease_s:g} s")

    def _over(self, session: Session[T], cause: str) -> None:
        if self._store:
            self._store.session(session.number, None)
        self._end_session(cause)
        self._proceed()

    def _end_session(self, cause: str) -> None:
        """Without a word to the store: what a session held waits again on replay as well."""
        if self.current is None:
            return
        self.current.ended = cause
        self.current = None
        returned = list(self._out.values())
        self._out.clear()
        self._let_go.clear()
        self._trained_bytes = self._trained_sequences = self._trained_groups = 0
        self._unmet = None
        self._chooser.done()
        self._return(returned)
        for request in [request for request in self._requests if request.session.ended]:
            self._requests.remove(request)
            if not request.answer.done():
                request.answer.set_exception(request.session.lost())

    def _return(self, returned: list[Held[T]]) -> None:
        for held in returned:
            held.state = "waiting"
            self._watch_version(held)
        self._lanes.requeue(returned)

    def _settle(self, some: Sequence[Held[T]], cause: str | None = None) -> None:
        """They leave the hub: committed, or dropped for a `cause`."""
        if not some:
            return
        entries = [self._entry(held) for held in some] if cause is not None else []
        if self._store:
            self._store.settle([held.id for held in some], committed=cause is None)
        for held in some:
            del self._held[held.id]
            if held.state == "waiting":
                self._lanes.dequeue(held, served=False)
            else:
                del self._out[held.id]
                if held.state == "trained":
                    self._count_trained(held, -1)
            self._lanes.leave_room(held.label)
            if cause is None:
                self._committed += 1
            else:
                self.dropped[cause] += 1
        for entry in entries:
            self._on_dropped(entry, cause or "")

    def _count_trained(self, held: Held[T], sign: int) -> None:
        self._trained_groups += sign
        self._trained_bytes += sign * held.label.size_bytes
        self._trained_sequences += sign * held.label.sequences

    def _entry(self, held: Held[T]) -> Entry[T]:
        """With the payload None where the store's copy is damaged."""
        payload = held.payload
        if payload is None and self._store is not None:
            try:
                payload = self._store.read(held.id)
            except DataError as error:
                console.warn(f"{error} Its group of task {held.label.task!r} is dropped.")
        return Entry(held.id, cast(T, payload), held.label, self._clock() - held.since)

    # -- batches

    def _lease(self, want: Want, version: int) -> list[Entry[T]] | None:
        """A batch, if one can be formed now."""
        self._drop_stale(version)
        self._unmet = want
        while self._admit_offers() | self._let_past():
            self._drop_stale(version)
        while (batch := self._chooser.form(want, stuck=self._is_stuck())) is not None:
            batch.sort(key=lambda held: held.id)
            entries = [self._entry(held) for held in batch]
            torn = {entry.id for entry in entries if entry.payload is None}
            if torn:
                self._settle([held for held in batch if held.id in torn], "damaged")
                continue
            if self._store:
                self._store.mark([held.id for held in batch], "leased")
            self._lanes.mark_time()
            for held in batch:
                self._lanes.dequeue(held, served=True)
                held.state = "leased"
                self._out[held.id] = held
                if self._store:
                    held.payload = None
            self._unmet = None
            self._chooser.done()
            return entries
        return None

    def _watch_version(self, held: Held[T]) -> None:
        if self.max_staleness is not None and held.label.oldest_version is not None:
            heapq.heappush(self._by_version, (held.label.oldest_version, held.id))
        if len(self._by_version) > 2 * len(self._held) + 1000:  # most of them have left
            waiting = (one for one in self._held.values() if one.state == "waiting")
            self._by_version = [
                (one.label.oldest_version, one.id) for one in waiting if one.label.oldest_version is not None
            ]
            heapq.heapify(self._by_version)

    def _drop_stale(self, version: int) -> None:
        """Also what comes in for what goes, where that is stale as well."""
        if self.max_staleness is None:
            return
        while stale := self._take_stale(version - self.max_staleness):
            try:
                self._settle(stale, "stale")
            except StoreFull:
                for held in stale:
                    self._watch_version(held)
                raise
            self._admit_offers()

    def _take_stale(self, oldest: int) -> list[Held[T]]:
        stale: dict[int, Held[T]] = {}
        while self._by_version and self._by_version[0][0] < oldest:
            _, id = heapq.heappop(self._by_version)
            held = self._held.get(id)
            if held is not None and held.state == "waiting":
                stale[id] = held
        return list(stale.values())

    # -- progress

    def _proceed(self) -> None:
        """Do all that has become possible: puts that fit, leases that can be filled."""
        while self._admit_offers() | self._serve():
            pass
        if self._requests and self._starving and self._is_stuck() and hub_report.is_small(self):
            request = self._requests.popleft()
            self._unmet = None
            request.answer.set_exception(hub_report.too_small(self, request.want))
            self._proceed()

    def _serve(self) -> bool:
        served = False
        while self._requests:
            request = self._requests[0]
            try:
                batch = self._lease(request.want, request.version)
            except StoreFull as error:
                self._requests.popleft()
                request.answer.set_exception(error)
                continue
            if batch is None:
                break
            self._requests.popleft()
            request.answer.set_result(batch)
            served = True
        return served

    @property
    def _starving(self) -> bool:
        """The batch that was last asked for needs more than waits: now fairness must not keep anything out."""
        want, lanes = self._unmet, self._lanes
        if want is None:
            return False
        return (lanes.waiting if want.groups else lanes.waiting_sequences) < want.size

    def _is_stuck(self) -> bool:
        """Somebody waits for room that only the trainer can make."""
        if not self._offers:
            return False
        lanes = self._lanes
        return any(lane.offers and not lanes.fits(lane.offers[0].label) for lane in lanes.by_name.values())

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise HubClosed("the hub is closed: the run is ending")

    async def close(self) -> None:
        """Twice is fine."""
        self.stop()

    def stop(self) -> None:
        """Wake everyone who waits, with HubClosed. What is held stays in the store, and can still be settled."""
        self._closed = True
        closed = HubClosed("the hub is closed: the run is ending")
        for lane in list(self._lanes.by_name.values()):
            for offer in lane.offers:
                offer.answer.set_exception(closed)
            lane.offers.clear()
        self._offers = 0
        for request in self._requests:
            request.answer.set_exception(closed)
        self._requests.clear()

    # -- what is known

    def status(self) -> HubStatus:
        """Takes the same time whatever the number of groups."""
        return hub_report.status(self)

    def state(self) -> Mapping[str, Any]:
        """For the checkpoint that `commit` follows, of a run whose hub is in its own process."""
        committed = self._committed + self._trained_groups + len(self._let_go)
        return {"next": self._next, "committed": committed, "stale": self.dropped["stale"]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._next, self._committed, self.dropped["stale"] = state["next"], state["committed"], state["stale"]

    def _restore(self, store: Store[T]) -> None:
        now = self._clock()
        known = store.restored(now)
        self._next, self._committed, self._sessions = known.next_id, known.committed, known.session
        self._keys.update(list(known.keys)[-KEYS:])
        for held in known.held:
            self._held[held.id] = held
            self._lanes.take_room(held.label, now)
            if held.state == "waiting":
                self._lanes.enqueue(held)
                self._watch_version(held)
            else:
                self._out[held.id] = held
                if held.state == "trained":
                    self._count_trained(held, 1)
        if known.holder is not None:
            self.current = Session(self, known.session, known.holder, now)


def _digest(key: str | None) -> bytes | None:
    return None if key is None else blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()
