"""The trajectory API for an environment worker: draws to run, groups to put, and a heartbeat in the background."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import console
from atropos_core.codec import encode_bytes
from atropos_core.errors import (
    AccessRefused,
    ApiError,
    AtroposError,
    DeadlineExceeded,
    HubFull,
    ProcessDied,
    TokenizerMismatch,
)
from atropos_core.types import Draw, Sampling, ScoredGroup
from atropos_trajectory_client.http import (
    GROUP_FRAMES,
    LONG_POLL_S,
    NOT_WANTED,
    Api,
    UnknownThere,
    in_background,
    reason,
)

if TYPE_CHECKING:
    from atropos_trajectory_client.shm.producer import RingProducer

AWAY_S = 600.0  # that a server may be away before its workers give up


@dataclass(frozen=True)
class Assignment:
    """Draws to run, and how to run them."""

    draws: tuple[Draw, ...]
    group_size: int
    min_group: int
    sampling: Sampling
    version: int
    deadline_s: float | None = None  # for each rollout; None: the worker's own


@dataclass(frozen=True)
class WorkerSpec:
    """The data with which a worker registers."""

    name: str
    environment: str
    tasks: int
    weight: float = 1.0
    minimum: float = 0.0  # share of each batch
    group_size: int = 0  # 0: whatever the trainer says
    tokenizer: str = ""  # fingerprint
    vocabulary: int = 0
    digest: str = ""  # of its training tasks; "" if they are made as they are read


class Worker:
    """One environment worker. `broken` raises the error that ended it for good: another tokenizer, a refused token."""

    def __init__(self, api: Api, spec: WorkerSpec) -> None:
        self.api = api
        self.spec = spec
        self.version = 0  # of the policy
        self.engines: tuple[str, ...] = ()
        self.policy: Mapping[str, Any] | None = None  # tokenizer, vocabulary, model; None before a trainer came
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._id = ""
        self._heartbeat_s = 10.0
        self._running: set[int] = set()
        self._draining = False
        self._keys = (f"{secrets.token_hex(8)}-{n}" for n in range(1 << 62))
        self._registering = asyncio.Lock()
        self._drawing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._ring: RingProducer | None = None  # on the server's own machine

    @classmethod
    async def register(cls, api: Api, spec: WorkerSpec, *, deadline_s: float | None = None) -> Worker:
        """Register. Raises TokenizerMismatch if the policy has another tokenizer, ApiError if the server is too old to read this
        worker's groups."""
        worker = cls(api, spec)
        about = await api.about(deadline_s)
        if (frames := about.get("frames", 1)) < GROUP_FRAMES:
            raise ApiError(
                f"{api.url} is an `atropos serve` of an older version ({about.get('version')}), which reads groups of form {frames}, "
                f"and this worker sends form {GROUP_FRAMES}.",
                remedy="Start the server with this version; it reads what older workers send.",
            )
        await worker._register(deadline_s)
        await worker._find_ring()
        worker._beating = asyncio.create_task(in_background(worker._beat, worker.broken))
        return worker

    async def draws(self, n: int, wait_s: float = LONG_POLL_S) -> Assignment:
        """Return up to `n` draws to run; none if none came in `wait_s`, or there is no trainer."""
        async with self._drawing:  # one at a time: the call lists the draws that run already
            body = {"n": n, "wait_s": wait_s, "playing": sorted(self._running)}
            found = await self._named("POST", "draws", body, wait_s=wait_s)
            self.version = found["version"]
            self._running |= {draw.id for draw in found["draws"]}
        return Assignment(**found)

    def new_key(self) -> str:
        """Return a key that identifies one group."""
        return next(self._keys)

    async def put(self, group: ScoredGroup, *, deadline_s: float, key: str | None = None) -> int | None:
        """Put a group, waiting for room. Return its id in the hub, once the server has it safely, or None if it is not wanted any more.
        Raises HubFull or ApiError at the deadline; then try again with the same `key`, because an earlier try may still arrive.
        Raises DataError (TooLarge is one) if the server will never take it."""
        key, until = key or self.new_key(), time.monotonic() + deadline_s
        frame = encode_bytes(group)
        while True:
            left = max(until - time.monotonic(), 0.001)
            try:
                number = await self._send(frame, key, left)
                break
            except HubFull:
                if time.monotonic() + 0.5 >= until:
                    raise
                await asyncio.sleep(random.uniform(0.05, 0.5))
        self._running.discard(group.draw.id)
        return number if number != NOT_WANTED else None

    async def _send(self, frame: bytes, key: str, left: float) -> int:
        if (ring := self._ring) is not None:
            try:
                return (await ring.put([frame], key=key, meta=self._id.encode(), deadline_s=left)).value
            except ProcessDied:
                if self._ring is ring:
                    self._ring = None
                    console.say(f"worker {self.spec.name}: the ring has ended; groups travel over HTTP")
            except DeadlineExceeded as error:  # groups of this worker wait there for room, before this one
                raise HubFull(f"{self.api.url} has no room: {Exception.__str__(error)}.") from error
        wait_s = min(left, LONG_POLL_S)
        body = {"groups": [{"key": key, "worker": self._id, "frame": frame}], "wait_s": wait_s}
        found = await self.api.call("POST", "/v1/groups", body, wait_s=wait_s, deadline_s=left - wait_s + 1.0)
        number: int = found["ids"][0]
        return number

    async def _find_ring(self, deadline_s: float | None = None) -> None:
        """Use shared memory if the server offers it and is on this machine: its nonce is behind its path."""
        offer = (await self.api.about(deadline_s)).get("same_host")
        if self._ring is not None or not offer or not Path(offer["path"]).exists():
            return
        from atropos_trajectory_client.shm.producer import RingProducer

        try:
            self._ring = await RingProducer.open(Path(offer["path"]), offer["nonce"], name=self.spec.name)
            console.say(f"worker {self.spec.name}: groups travel through shared memory to the server on this machine")
        except (AtroposError, OSError) as error:
            console.say(f"worker {self.spec.name}: no shared memory with the server, so over HTTP: {reason(error)}")

    async def failed(self, group: ScoredGroup, *, deadline_s: float = AWAY_S) -> None:
        """Report a draw with too few finished rollouts to the trainer."""
        await self._named("POST", "failed", {"group": group}, deadline_s=deadline_s)
        self._running.discard(group.draw.id)

    async def give_back(self, draws: Iterable[Draw]) -> None:
        """Give back draws that will not be run here, so that another worker can have them."""
        returned = {draw.id for draw in draws}
        self._running -= returned
        await self._heartbeat(returned)

    async def drain(self) -> None:
        """Take no more draws; running ones may still be finished."""
        self._draining = True
        await self._heartbeat()

    async def close(self) -> None:
        """Sign off; unfinished draws go to other workers. May be called twice."""
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()
            if self._ring is not None:
                self._ring.close()
            with contextlib.suppress(AtroposError):  # a server that is away notices later
                await self.api.call("DELETE", f"/v1/workers/{self._id}", deadline_s=2.0)

    async def _register(self, deadline_s: float | None) -> None:
        body = asdict(self.spec) | {"playing": sorted(self._running)}
        found = await self.api.call("POST", "/v1/workers", body, deadline_s=deadline_s)
        self._id, self._heartbeat_s, self.policy = found["worker"], found["heartbeat_s"], found["policy"]
        self.version, self.engines = found["version"], tuple(found["engines"])

    async def _named(
        self, method: str, what: str, body: Any, wait_s: float = 0.0, deadline_s: float | None = None
    ) -> Any:
        """Make a call of this worker by its id. If the server has forgotten the worker, register again."""
        for _ in range(3):
            worker_id = self._id
            try:
                path = f"/v1/workers/{worker_id}/{what}"
                return await self.api.call(method, path, body, wait_s=wait_s, deadline_s=deadline_s)
            except UnknownThere:
                async with self._registering:
                    if self._id == worker_id:
                        await self._register(deadline_s)
                        await self._find_ring(deadline_s)
        raise ApiError(f"{self.api.url} forgets worker {self.spec.name!r} as soon as it registers.")

    async def _heartbeat(self, returned: Iterable[int] = ()) -> None:
        body = {"draining": self._draining, "returned": sorted(returned)}
        found = await self._named("POST", "heartbeat", body)
        self.version, self.engines = found["version"], tuple(found["engines"])
        self.policy = found["policy"]

    async def _beat(self) -> None:
        away = False
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                await self._heartbeat()
                away = False
            except (TokenizerMismatch, AccessRefused):
                raise
            except AtroposError as error:
                if not away:
                    console.warn(f"worker {self.spec.name}: {Exception.__str__(error)} Trying on.")
                away = True
