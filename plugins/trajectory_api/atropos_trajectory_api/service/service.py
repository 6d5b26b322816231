"""The state that the server's endpoints share: hub, workers, draws, the trainer's session. No HTTP in here."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atropos_core import console
from atropos_core.errors import AtroposError, DataError, LeaseLost, StoreFull
from atropos_core.guards.worker_threads import apart
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, GroupRecord, Label, Limits
from atropos_core.hub.session import Session
from atropos_core.types import Draw, Sampling, ScoredGroup
from atropos_trajectory_api.groups.frame_check import Checked, check_frame, has_long_header
from atropos_trajectory_api.legacy_groups.stored_group import check_stored
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.counters import Counters
from atropos_trajectory_api.service.draws import Draws, Rules
from atropos_trajectory_api.service.leasing import Answer, Leasing, Outbox
from atropos_trajectory_api.service.old_state import OldState
from atropos_trajectory_api.service.workers import Policy, Workers, WorkerState
from atropos_trajectory_client.client import DAMAGED, NOT_WANTED, OTHER_TIMELINE

TRAINERS_CAUSES = (OTHER_TIMELINE, DAMAGED)
_NEVER_STALE = 1 << 30


@dataclass(frozen=True)
class Trainer:
    """The present trainer, and how its draws are run."""

    holder: str
    policy: Policy
    group_size: int
    min_group: int
    sampling: Sampling
    batch_groups: int
    max_staleness: int
    max_token_len: int
    deadline_s: float | None = None  # of one rollout; None: the workers' own


class Service:
    """One server. `open` loads what the journal holds; `tick` must be called once a second; `close` at the end."""

    def __init__(self, options: ServeOptions, store: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.boot = secrets.token_hex(8)  # tells clients that the server was restarted
        self.counters = Counters()
        self.old = OldState()
        self.policy: Policy | None = None
        self.trainer: Trainer | None = None
        self.version = 0
        self.newest_version: int | None = None  # that engines can have sampled from; None: no trainer has reported one
        self.engines: list[str] = []
        self.same_host: dict[str, str] | None = None  # path and nonce, once the endpoint listens
        self.workers = Workers(clock, options.silent_s)
        self.heartbeat_s = options.silent_s / 4
        self._store = store
        self.hub: Hub[bytes] = Hub(
            Limits(int(options.hub_mb * 1e6), options.hub_sequences, "--hub-mb", "--hub-sequences"),
            max_staleness=_NEVER_STALE,
            on_dropped=self._dropped,
            store=store,
            lease_s=options.lease_s,
            allocation_grace_s=options.allocation_grace_s,
            clock=clock,
        )
        self._draw_of = self._drawn()  # draw of each group in the hub
        self.draws = Draws(self._draw_of.values())
        self._number = -1  # of the trainer's session
        self._outbox = Outbox()
        self._leasing = Leasing(self._outbox)
        self._arriving: dict[int, str | None] = {}  # draw -> key of its put; another key for each run
        self._dropped_by_trainer: frozenset[int] = frozenset()  # groups that it is dropping at this moment
        self._strays: set[int] = set()  # groups of the former run that arrived while another one took over
        self._undrawn = {label.environment for _, label in self.hub.labels() if not _is_drawn(label)}
        self._holder = ""  # of the last native session
        self._first_id = 0  # groups with lower ids were drawn for another run
        self.hub_id = secrets.token_hex(8)  # ids of one hub mean nothing in another
        self._restore(clock())
        self.old.on_change = self.save

    @classmethod
    def open(cls, options: ServeOptions) -> Service:
        """Raises RunDirectoryError if another server has the directory, and the errors of a journal that cannot be trusted."""
        if not options.journal:
            return cls(options)
        from atropos_trajectory_api.journal.store import JournalStore

        store = JournalStore(options.directory / "journal", sync=options.sync)
        service = cls(options, store)
        store.check = lambda payload: check_stored(payload, service.vocabulary)
        return service

    async def tick(self) -> None:
        """End the session of a silent trainer, and drop silent workers, whose draws go to others."""
        if self._store is not None:
            self._store.tick()
        self.hub.tick()
        current = self.hub.current
        if self.trainer is not None and (current is None or current.number != self._number):
            self._trainer_gone()
        for worker in self.workers.silent():
            console.warn(
                f"worker {worker.name} of {worker.environment!r} has been silent for {self.options.silent_s:g} s: "
                f"it is dropped, and {self._let_go(worker)} draws that it ran go to others."
            )

    def stop(self) -> None:
        """The server is ending: answer all that wait for groups, draws or room now."""
        self.draws.stop()
        self._leasing.stop()
        self.hub.stop()

    async def close(self) -> None:
        self.hub.stop()
        if self._store is not None:
            self._store.close()

    def may_write(self) -> bool:
        """True if more than the journal may use space on its disk now."""
        return self._store is None or bool(self._store.has_reserve())

    def save(self) -> None:
        """Save the state that must survive the process, other than the groups."""
        if self._store is None:
            return
        trainer = None
        if self.trainer is not None:
            trainer = {
                **vars(self.trainer),
                "policy": asdict(self.trainer.policy),
                "sampling": self.trainer.sampling.of_run(),
            }
        self._store.save_meta(
            {"trainer": trainer, "number": self._number, "version": self.version, "old": self.old.state(),
             "holder": self._holder, "first_id": self._first_id, "hub_id": self.hub_id,
             "newest_version": self.newest_version}
        )  # fmt: skip

    @property
    def unready(self) -> str | None:
        """The reason why no groups are taken now."""
        return self._store.full if self._store is not None else None

    # -- groups

    @property
    def vocabulary(self) -> int:
        """The number of token ids; 0 if unknown."""
        return self.policy.vocabulary if self.policy else 0

    @property
    def durable_at_once(self) -> bool:
        """True if everything in the hub is already as durable as configured, so nothing waits for the disk."""
        return self._store is None or self.options.sync != "always"

    def read(self, frame: bytes) -> Checked:
        """Check a frame from outside. Raises DataError."""
        return check_frame(frame, self.vocabulary, self.newest_version)

    async def read_aside(self, frame: bytes) -> Checked:
        """As `read`, but a frame that takes long to read is read in a thread."""
        return await apart(self.read, frame) if has_long_header(frame) else self.read(frame)

    async def put(
        self, frame: bytes, checked: Checked, *, key: str | None = None, worker: str = "", deadline_s: float
    ) -> int:
        """Put a group into the hub, and return its id there once it is as durable as configured, or NOT_WANTED. `worker` is an id.
        Raises HubFull, HubClosed."""
        draw, label = checked
        arriving, key = self._arriving, key or None
        if self._is_unwanted(draw, key, worker):
            return NOT_WANTED
        drawn = None if draw is None or draw.id < 0 else draw.id
        if drawn is not None:
            arriving[drawn] = key
        try:
            number = await self.hub.put(frame, label, key=key, deadline_s=deadline_s)
        except asyncio.CancelledError:
            if key and self.hub.knows(
                key
            ):  # its worker went away, but the group is in the hub: it need not be run again
                stored = self.hub.try_put(frame, label, key=key)
                assert stored is not None, "the id of a known key"
                self._arrived(stored, draw, label, arriving)
            raise
        finally:
            if drawn is not None:
                arriving.pop(drawn, None)
        self._arrived(number, draw, label, arriving)
        self._count(worker, draw, label)
        return number

    def try_put(self, frame: bytes, checked: Checked, *, key: str | None = None, worker: str = "") -> int | None:
        """As `put`, but return None if the group must wait for room. If the server is not `durable_at_once`, `written` returns when
        the group is on disk."""
        draw, label = checked
        key = key or None
        if self._is_unwanted(draw, key, worker):
            return NOT_WANTED
        number = self.hub.try_put(frame, label, key=key)
        if number is not None:
            self._arrived(number, draw, label, self._arriving)
            self._count(worker, draw, label)
        return number

    def _is_unwanted(self, draw: Draw | None, key: str | None, worker: str) -> bool:
        """True if another group of this draw is there or on its way, or the draw was not requested."""
        if draw is None or draw.id < 0 or (key and self.hub.knows(key)):
            return False
        another = draw.id in self._arriving and (key is None or self._arriving[draw.id] != key)
        if another or self.draws.refusal(draw, worker) is not None:
            self.counters.dropped("not_wanted")
            return True
        return False

    def _count(self, worker: str, draw: Draw | None, label: Label) -> None:
        sender = self.workers.find(worker)
        if draw is None:
            name = label.environment
        else:
            name = sender.name if sender else ""
            if sender is not None:
                sender.running.discard(draw.id)
        self.counters.group(name, label.environment, label.sequences, label.size_bytes)

    def _arrived(self, number: int, draw: Draw | None, label: Label, arriving: Mapping[int, str | None]) -> None:
        if draw is None or draw.id < 0:
            self._undrawn.add(label.environment)
        elif arriving is self._arriving:
            self._draw_of[number] = draw.id
            self.draws.arrived(draw)
        else:
            self._strays.add(number)

    def failed(self, worker: WorkerState, group: ScoredGroup) -> None:
        """Record that too few rollouts of a draw ended in an episode, so that its trainer hears of it."""
        worker.running.discard(group.draw.id)
        if self.draws.failed(group.draw, worker.id):
            self._outbox.post(group)

    # -- workers

    def register(self, wanted: Mapping[str, Any]) -> WorkerState:
        """Raises TokenizerMismatch, DataError."""
        worker = self.workers.register(wanted)
        try:
            if self.policy is not None:
                self.policy.refuse_other(worker.name, worker.tokenizer, worker.vocabulary)
            self.hub.share(worker.environment, weight=worker.weight, minimum=worker.minimum)
        except AtroposError:
            self.workers.forget(worker.id)
            raise
        self.draws.mark_running(worker.id, worker.running)
        return worker

    def heartbeat(self, worker: WorkerState, *, draining: bool, returned: set[int]) -> None:
        """`returned`: draws that the worker will not run."""
        worker.draining = draining
        worker.running -= returned
        self.draws.give_back(worker.id, only=returned)
        self.draws.keep_running(worker.id, worker.running)

    async def take(self, worker: WorkerState, n: int, *, running: set[int], wait_s: float) -> list[Draw]:
        """Draws for a worker, which already runs `running`. Other draws that it was given were in an answer that got lost."""
        self.draws.give_back(worker.id, only=worker.running - running)
        worker.running = running
        self.draws.keep_running(worker.id, running)
        draws = [] if worker.draining else await self.draws.take(worker.id, worker.environment, n, wait_s)
        worker.running |= {draw.id for draw in draws}
        return draws

    def sign_off(self, worker: WorkerState) -> None:
        self._let_go(worker)

    def _let_go(self, worker: WorkerState) -> int:
        self.workers.forget(worker.id)
        if not self.workers.has(worker.environment):
            self.hub.forget(worker.environment)
        self.draws.keep_running(worker.id, ())
        return self.draws.give_back(worker.id)

    # -- the trainer

    def open_session(
        self, trainer: Trainer, committed: Iterable[int], version: int, *, hub_id: str | None = None
    ) -> int:
        """Open a session and return its number. What its holder trained but did not commit waits again. Another holder is another
        run, which does not get groups that were drawn for the former one. `hub_id`: the hub that gave the ids in `committed`, if
        the opener knows it; ids of another hub name other groups here."""
        anew = trainer.holder != self._holder
        if hub_id is not None and hub_id != self.hub_id:
            committed = ()
        first = max(self._draw_of, default=-1) + 1 if anew else self._first_id
        self._number = self.hub.open(trainer.holder, committed).number
        self._draw_of = self._drawn()
        self.trainer, self._holder, self._first_id = trainer, trainer.holder, first
        self.policy, self.version = trainer.policy, version
        self._raise_newest(version)
        self.hub.max_staleness = trainer.max_staleness
        self.engines.clear()
        self._outbox.clear()
        held = [draw for number, draw in self._draw_of.items() if number >= first]
        if anew:
            self._arriving = {}
        running = [(worker.id, draw) for worker in self.workers.all() for draw in worker.running]
        self.draws.begin(self._rules(trainer), held, anew=anew, running=running)
        for worker in list(self.workers.all()):
            with contextlib.suppress(AtroposError):
                trainer.policy.refuse_other(worker.name, worker.tokenizer, worker.vocabulary)
                continue
            self._let_go(worker)  # it registers again, and then learns why it cannot
        self.old.serve_native(
            batch_size=trainer.batch_groups * trainer.group_size, max_token_len=trainer.max_token_len, step=version
        )
        self.save()
        return self._number

    def session(self, number: int) -> Session[bytes]:
        """The trainer's session. Raises LeaseLost if it is over."""
        session = self.hub.session(number)
        if number != self._number:
            raise LeaseLost(
                f"session {number} is not one of the native protocol.", remedy="Open one: POST /v1/sessions."
            )
        return session

    async def lease(
        self,
        number: int,
        groups: int,
        *,
        version: int,
        wait_s: float,
        holding: set[int],
        seen: int,
        trained: Sequence[int] = (),
    ) -> Answer:
        """Groups, or notices of draws that will bring none, as soon as there is either. Leased groups that are neither `trained`
        since nor in `holding` were in an answer that got lost; notices up to `seen` did arrive."""
        session = self.session(number)
        session.trained(trained)
        if self._raise_newest(
            version + 1
        ):  # what is leased trains the next one, which engines may have before it is reported
            self._save_unless_full()
            await self.written()
        self._outbox.arrived(seen)
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            left = max(until - asyncio.get_running_loop().time(), 0.0)
            entries, why = await self._leasing.lease(session, BatchSize(groups=groups), version, left, holding)
            foreign = [entry.id for entry in entries if self._is_foreign(entry)]
            if not foreign:
                break
            session.drop(foreign, "other_run")  # the others are returned with the next turn
            self._strays.difference_update(foreign)
            console.warn(f"{len(foreign)} groups that were drawn for another run are dropped.")
        for entry in entries:
            if entry.label.oldest_version is not None:
                self.counters.lag(version - entry.label.oldest_version)
        failed, dropped, posted = self._outbox.read()
        return Answer(entries, failed, dropped, posted, session.commit_due, why)

    def _is_foreign(self, entry: GroupRecord[bytes]) -> bool:
        return _is_drawn(entry.label) and (entry.id < self._first_id or entry.id in self._strays)

    def commit(self, number: int, ids: Sequence[int]) -> int:
        """Commit groups and return how many that settles."""
        settled = self.session(number).commit(ids)
        self._strays.difference_update(ids)
        for one in ids:
            self._forget_draw(one)
        return settled

    def drop(self, number: int, ids: Sequence[int], cause: str) -> int:
        """Drop groups that the trainer will never train, and return their number. Raises DataError for a cause that it cannot have."""
        if cause not in TRAINERS_CAUSES:
            raise DataError(
                f"a trainer cannot drop groups for {cause!r}.", remedy=f"Known causes: {', '.join(TRAINERS_CAUSES)}."
            )
        session = self.session(number)
        self._dropped_by_trainer = frozenset(
            ids if cause == OTHER_TIMELINE else ()
        )  # the draw of a damaged group may be unknown
        try:
            return session.drop(ids, cause)
        finally:
            self._dropped_by_trainer = frozenset()

    async def written(self) -> None:
        """Return once all decisions are as durable as configured."""
        if self._store is not None:
            await self._store.written()

    def set_version(self, number: int, version: int, newest: int | None = None) -> None:
        """The engines sample from this version now, and may have versions up to `newest` until the next report."""
        self.session(number).renew()
        self.version = version
        raised, before = self._raise_newest(version if newest is None else newest), self.old.step
        self.old.advance(version)  # saves if it changes something
        if raised and version == before:
            self._save_unless_full()

    def add_engine(self, number: int, url: str) -> None:
        self.session(number).renew()
        if url not in self.engines:
            self.engines.append(url)

    @property
    def next_id(self) -> int:
        """An id above those of all groups in the hub."""
        return max((number for number, _ in self.hub.labels()), default=-1) + 1

    def end_session(self, number: int) -> None:
        self.session(number).close()
        self._trainer_gone()

    def _raise_newest(self, version: int) -> bool:
        """Raise the newest version. It never falls: workers may still send samples from before a run was resumed from an earlier
        checkpoint."""
        raised = self.newest_version is None or version > self.newest_version
        if raised:
            self.newest_version = version
        return raised

    def _trainer_gone(self) -> None:
        """The trainer is gone, but its policy stays known, so that groups of old environments are still checked."""
        self.trainer, self._number = None, -1
        self.engines.clear()
        self.draws.begin(None, self.draws.present, anew=False)
        self._save_unless_full()

    def _save_unless_full(self) -> None:
        try:
            self.save()
        except StoreFull as error:
            console.warn(f"a restarted server will not know the trainer's latest report: {Exception.__str__(error)}")

    # -- what is known

    def status(self) -> dict[str, Any]:
        """Plain values."""
        hub = self.hub.status()
        self._undrawn &= hub.environments.keys()
        old = self._undrawn | {one.name for one in self.old.environments.values() if one.connected}
        return {
            "hub": {**asdict(hub), "environments": {name: asdict(one) for name, one in hub.environments.items()}},
            "why": hub.why,
            "version": self.version,
            "trainer": self.trainer.holder if self.trainer else None,
            "policy": asdict(self.policy) if self.policy else None,
            "engines": list(self.engines),
            "old": sorted(old),
            "draws": self.draws.status(),
            "workers": [
                {
                    "name": one.name,
                    "environment": one.environment,
                    "playing": len(one.running),
                    "draining": one.draining,
                }
                for one in self.workers.all()
            ],
            "observed": self.counters.snapshot(),
        }

    def _drawn(self) -> dict[int, int]:
        return {number: label.draw or 0 for number, label in self.hub.labels() if _is_drawn(label)}

    def _dropped(self, entry: GroupRecord[bytes], cause: str) -> None:
        self.counters.dropped(cause)
        self._forget_draw(entry.id)
        if not self._is_foreign(entry) and entry.id not in self._dropped_by_trainer:
            draw = entry.label.draw if _is_drawn(entry.label) else -1
            self._outbox.post({"draw": draw, "cause": cause})

    def _forget_draw(self, number: int) -> None:
        if (draw := self._draw_of.pop(number, None)) is not None and number >= self._first_id:
            self.draws.gone(draw)

    @staticmethod
    def _rules(trainer: Trainer) -> Rules:
        return Rules(trainer.group_size, trainer.min_group, trainer.sampling, trainer.deadline_s)

    def _restore(self, now: float) -> None:
        meta = self._store.meta if self._store is not None else {}
        if not meta:
            return
        self.old.load(meta["old"], now)
        self._holder, self._first_id, self.version = meta["holder"], meta["first_id"], meta["version"]
        self.hub_id = meta.get("hub_id", self.hub_id)
        self.newest_version = meta.get("newest_version")
        self.draws.begin(None, [draw for number, draw in self._draw_of.items() if number >= self._first_id], anew=False)
        if (kept := meta["trainer"]) is None:
            return
        policy, sampling = Policy(**kept["policy"]), Sampling.from_run(kept["sampling"])
        trainer = Trainer(**{**kept, "policy": policy, "sampling": sampling})
        self.policy = policy
        self.hub.max_staleness = trainer.max_staleness
        if self.hub.current is not None and self.hub.current.number == meta["number"]:
            self.trainer, self._number = trainer, meta["number"]
            self.draws.begin(self._rules(trainer), self.draws.present, anew=False)


def _is_drawn(label: Label) -> bool:
    """True if a trainer's curriculum drew it."""
    return label.draw is not None and label.draw >= 0
