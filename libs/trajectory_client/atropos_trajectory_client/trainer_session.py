"""The trajectory API for the trainer: offer draws; lease, train and commit groups; renew the lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_core import console
from atropos_core.codec import decode
from atropos_core.errors import AccessRefused, AtroposError, DataError, LeaseLost, StoreFull
from atropos_core.group_schema import check_group, check_kept_is_known
from atropos_core.types import Draw, Sampling, ScoredGroup
from atropos_trajectory_client.http import DAMAGED, LONG_POLL_S, Api, in_background

_FULL_S = 0.5  # between two tries while the server's disk is full


@dataclass(frozen=True)
class SessionSpec:
    """The data with which a trainer opens its session."""

    holder: str  # names the run, also when it is resumed; another holder is another run
    group_size: int
    min_group: int
    sampling: Sampling
    batch_groups: int
    tokenizer: str = ""
    vocabulary: int = 0
    model: str = ""
    date: str = ""  # that chat templates are told
    max_staleness: int = 0
    max_token_len: int = 0
    version: int = 0
    deadline_s: float | None = None  # of one rollout; None: the workers' own


@dataclass(frozen=True)
class LeaseReply:
    """One answer to `TrainerSession.lease`: groups or none, and the outcome of draws that will bring none."""

    entries: tuple[tuple[int, ScoredGroup], ...] = ()  # hub id, group
    failed: tuple[ScoredGroup, ...] = ()
    dropped: tuple[tuple[int, str], ...] = ()  # draw id, cause
    commit_due: bool = False  # the hub fills with what is trained and not committed: save a checkpoint
    why: str | None = None  # no batch could be formed: what is missing

    def __bool__(self) -> bool:
        return bool(self.entries or self.failed or self.dropped)


@dataclass
class _Reported:
    """Reports of the trainer to the server, which it repeats after a restart of the server."""

    boot: str
    version: int
    newest: int  # that engines may sample from before the next report
    draws: dict[int, Draw] = field(default_factory=dict)  # offered, and nothing has come of them yet
    engines: list[str] = field(default_factory=list)


class TrainerSession:
    """The right of the one trainer to lease from the hub. Every call raises LeaseLost if another session was opened, or this one was
    silent for longer than its lease; `lost` raises it as soon as it is known. If the server is away, or its disk is full, a call
    is repeated for as long as the patience of `api` allows."""

    def __init__(self, api: Api, spec: SessionSpec, opened: Mapping[str, Any]) -> None:
        self.api = api
        self.spec = spec
        self.number: int = opened["session"]
        self.lease_s: float = opened["lease_s"]  # of silence, after which the session is over
        # A server that was killed counts a lease's silence anew once it is back, however long that took.
        self._away_s = api.patience.least_s
        self.environments: dict[str, dict[str, Any]] = opened["environments"]
        self.waiting_draws: frozenset[int] = frozenset(opened["waiting_draws"])  # their groups are in the hub
        self.draws_in_progress: frozenset[int] = frozenset(opened["played_draws"])  # workers run them
        self.hub_id: str = opened["hub_id"]  # the hub's whose ids these are
        self.next_id: int = opened["next_id"]  # groups with lower ids were there before this session
        # The highest version that any trainer reported to the server before this session; None: it knows of none.
        self.newest_before: int | None = opened.get("newest_version")
        self.commit_due = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holding: set[int] = set()  # hub ids that are leased here
        self._trained: set[int] = set()  # of what was leased; the server does not know of it yet
        self._reported = _Reported(opened["boot"], spec.version, spec.version)
        self._seen = 0  # failed and dropped draws that have arrived here
        self._turn = asyncio.Lock()
        self._renewing = asyncio.create_task(in_background(self._renew_on, self.lost))

    @classmethod
    async def open(
        cls,
        api: Api,
        spec: SessionSpec,
        *,
        committed: Sequence[int] = (),
        hub_id: str | None = None,
        deadline_s: float | None = None,
    ) -> TrainerSession:
        """Open a session and end the one before. `committed`: hub ids in the checkpoint that this trainer resumes from. `hub_id`, if
        given: the hub of those ids; another hub ignores them."""
        body = {**vars(spec), "committed": list(committed), "hub_id": hub_id}
        away_s = api.patience.least_s if deadline_s is None else deadline_s
        opened = await _once_there_is_room(
            lambda: api.call("POST", "/v1/sessions", body, deadline_s=deadline_s), time.monotonic() + away_s
        )
        return cls(api, spec, opened)

    async def lease(self, groups: int, version: int, wait_s: float) -> LeaseReply:
        """Return `groups` groups that fit `version`, or the outcome of draws that will bring none. If neither came in `wait_s`, the
        answer is empty, with a reason. If an answer does not arrive, nothing is lost."""
        until = time.monotonic() + wait_s
        self._reported.newest = max(self._reported.newest, version + 1)  # as the server takes it
        async with self._turn:
            while True:
                wait = max(min(until - time.monotonic(), LONG_POLL_S), 0.0)
                body = {
                    "groups": groups, "version": version, "wait_s": wait,
                    "holding": sorted(self._holding), "seen": self._seen, "boot": self._reported.boot,
                }  # fmt: skip
                found = await self._call_reporting("lease", body, wait_s=wait)
                leased = await self._take(found)
                if leased or time.monotonic() >= until:
                    return leased

    async def give_back(self, ids: Sequence[int]) -> None:
        await self._call("give_back", {"ids": list(ids)})
        self._holding -= set(ids)

    def trained(self, ids: Sequence[int]) -> None:
        """Record that updates are in the trainer's memory: these ids belong to its next checkpoint. The server is told with the next
        lease or renewal, which raises LeaseLost if they were leased to another session meanwhile."""
        self._trained |= set(ids)
        self._holding -= set(ids)

    async def commit(self, ids: Sequence[int]) -> int:
        """Record that updates are in a durable checkpoint: these groups are never served again. Return how many that settles."""
        settled: int = (await self._call("commit", {"ids": list(ids)}))["settled"]
        self._holding -= set(ids)
        self._trained -= set(ids)
        return settled

    async def drop(self, ids: Sequence[int], cause: str) -> int:
        """Remove groups that will never be trained, counted under `cause`. Return how many were in the hub."""
        dropped: int = (await self._call("drop", {"ids": list(ids), "cause": cause}))["dropped"]
        self._holding -= set(ids)
        return dropped

    async def offer_draws(self, draws: Sequence[Draw]) -> None:
        self._reported.draws |= {draw.id: draw for draw in draws}
        await self._call("draws", {"draws": list(draws)})

    async def set_version(self, version: int) -> None:
        """Report the version that the engines sample from."""
        reported = self._reported
        reported.version, reported.newest = version, max(reported.newest, version)
        await self._call("version", {"version": version})

    async def announce(self, version: int) -> None:
        """Report that engines are about to sample from this version. Not needed for the version after the one leased for; groups with
        versions that the server does not know are refused."""
        reported = self._reported
        reported.newest = max(reported.newest, version)
        await self._call("version", {"version": reported.version, "newest": max(reported.newest, reported.version)})

    async def add_engine(self, url: str) -> None:
        """Let workers sample from the engine behind this URL."""
        self._reported.engines.append(url)
        await self._post_engine(url)

    async def fetch_environments(self) -> dict[str, dict[str, Any]]:
        """Return the environments that have workers now."""
        self.environments = await self.api.call("GET", "/v1/environments", deadline_s=self._away_s)
        return self.environments

    async def renew(self) -> None:
        await self._call_reporting("renew", {})

    async def close(self) -> None:
        """End the session: groups that are leased but not committed go back. May be called twice."""
        if self._renewing.cancel():
            with contextlib.suppress(AtroposError):  # a server that is away ends the session itself
                await self.api.call("DELETE", f"/v1/sessions/{self.number}", deadline_s=2.0)

    async def _take(self, found: Mapping[str, Any]) -> LeaseReply:
        """Drop and report groups that must not be trained, which an older server may have let in."""
        self.commit_due, self._seen = found["commit_due"], found["seen"]
        entries: list[tuple[int, ScoredGroup]] = []
        damaged: dict[int, int] = {}  # hub id -> draw, -1 if that cannot be read
        for entry in found["entries"]:
            number, group = entry["id"], None
            try:
                group = decode(entry["frame"])
                check_group(group, self.spec.vocabulary)
                check_kept_is_known(group)
                entries.append((number, group))
            except DataError as error:
                draw = group.draw if isinstance(group, ScoredGroup) else None
                damaged[number] = draw.id if isinstance(draw, Draw) and type(draw.id) is int else -1
                console.warn(
                    f"group {number} of {self.api.url} cannot be trained and is dropped: {Exception.__str__(error)}"
                )
        notices = [(entry["draw"], entry["cause"]) for entry in found["dropped"]]
        dropped = (*notices, *(await self._drop_damaged(damaged) if damaged else ()))
        self._holding |= {number for number, _ in entries}
        done = [group.draw.id for group in (*(group for _, group in entries), *found["failed"])]
        for number in (*done, *(number for number, _ in dropped)):
            self._reported.draws.pop(number, None)
        return LeaseReply(tuple(entries), tuple(found["failed"]), dropped, self.commit_due, found["why"])

    async def _drop_damaged(self, damaged: Mapping[int, int]) -> list[tuple[int, str]]:
        """Return the outcome of their draws, if the server will not report it with its next answer."""
        try:
            await self.drop(list(damaged), DAMAGED)
        except DataError:  # it does not know this cause
            await self.commit(list(damaged))  # then as what is never served again
            return [(draw, DAMAGED) for draw in damaged.values()]
        return []

    async def _post_engine(self, url: str) -> None:
        body = {"session": self.number, "url": url}
        await self.api.call("POST", "/v1/engines", body, deadline_s=self._away_s)

    async def _call(self, what: str, body: dict[str, Any], *, wait_s: float = 0.0) -> Any:
        if self.lost.done():
            self.lost.result()
        path = f"/v1/sessions/{self.number}/{what}"
        found = await _once_there_is_room(
            lambda: self.api.call("POST", path, body, wait_s=wait_s, deadline_s=self._away_s),
            time.monotonic() + wait_s + self._away_s,
        )
        if found["boot"] != self._reported.boot:
            await self._report_again(found["boot"])
        return found

    async def _call_reporting(self, what: str, body: dict[str, Any], *, wait_s: float = 0.0) -> Any:
        """Make a call that also reports what was trained. Reporting it twice changes nothing."""
        reported = sorted(self._trained)
        found = await self._call(what, body | {"trained": reported}, wait_s=wait_s)
        self._trained -= set(reported)
        return found

    async def _report_again(self, boot: str) -> None:
        """The server was restarted: its hub is as it was, but what it kept only in memory is gone. Report it again."""
        reported = self._reported
        before, reported.boot, self._seen = reported.boot, boot, 0
        try:
            for url in reported.engines:
                await self._post_engine(url)
            await self._call("version", {"version": reported.version, "newest": max(reported.newest, reported.version)})
            await self._call("draws", {"draws": list(reported.draws.values())})
        except BaseException:
            reported.boot = before  # the next call tries again
            raise

    async def _renew_on(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 4)
            try:
                await self.renew()
            except (LeaseLost, AccessRefused):
                raise
            except AtroposError as error:
                console.warn(f"trainer: {Exception.__str__(error)} Trying on.")


async def _once_there_is_room(call: Callable[[], Awaitable[Any]], until: float) -> Any:
    """Return the answer of a call that can be repeated if the server's disk is full. Raises StoreFull at `until`."""
    said = False
    while True:
        try:
            return await call()
        except StoreFull as error:
            left = until - time.monotonic()
            if left <= 0:
                raise
            if not said:
                console.warn(f"trainer: {error} Trying on, for {left:.0f} s at most.")
                said = True
            await asyncio.sleep(min(_FULL_S, left))
