"""Send work to other processes of this machine and receive their answers through shared memory, with one ring each way.

A trainer without an engine submits requests. Workers, which have one, answer in pieces as large as a row of a batch.

- A request goes to a worker with a free slot, under a new id. If it is never answered, it keeps the slot.
- If a worker dies, its ring ends. Its requests then go to another worker from the start.
- The same happens if a worker is stopped for too long.

    trainer:  exchange = WorkQueue(folder); await exchange.open(); pieces = await exchange.submit(b"...", deadline_s=60, read=bytes)
    worker:   client = WorkClient.connect(folder, 4)                                            # atropos_adapter_skyrl.work_client
              for job in client.take(1.0): client.send(job, [b"..."]); client.done(job)

Only one user may access the folder. It holds sockets; the shared memory has no name, so none of it can be left behind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
import shutil
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from atropos_adapter_skyrl.stopped_process import stopped_too_long
from atropos_core import console
from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, HubFull, ProcessDied
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_core.storage.atomic import write_whole
from atropos_trajectory_client.shm.consumer import RingConsumer, SlotLease
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import RingProducer

T = TypeVar("T")
SOCKET, NONCE = "ring.sock", "nonce"
META = struct.Struct("<QB")  # a request's id; what this message is of it
PIECE, DONE, FAILED = 0, 1, 2
REQUEST_BYTES = 1 << 16  # largest request: a worker has one slot for each request that it takes at once
STASH_BYTES = 256 << 20


class WorkFailed(AtroposError):
    """A worker reports that it cannot do a job, and why."""


@dataclass(eq=False)
class _Request:
    id: int
    payload: bytes
    deadline_s: float
    answer: asyncio.Future[list[Any]]
    read: Callable[[bytes], Any]
    pieces: list[Any] = field(default_factory=list)
    size_bytes: int = 0
    late: asyncio.TimerHandle | None = None


class WorkQueue:
    """The trainer's end. It takes any number of calls at a time, in one event loop."""

    def __init__(self, folder: Path, *, stash_bytes: int = STASH_BYTES, patience: Patience = DEFAULT_PATIENCE) -> None:
        """`patience`: when to name a stopped worker, and when to give the requests that it had begun to another worker."""
        self.workers = 0  # connected workers
        self.requeued = 0  # requests that a worker had begun when it died
        self.unwanted = 0  # messages for requests that are no longer pending
        self.stashed_bytes = 0  # pieces of incomplete answers
        self._folder = folder.resolve()
        self._stash_bytes = stash_bytes
        self._patience = patience
        self._nonce = secrets.token_hex(16)
        self._ids = itertools.count(secrets.randbits(62))
        self._waiting: deque[_Request] = deque()  # not yet given to a worker
        self._arrived = asyncio.Event()  # something is in `_waiting`
        self._heard = -math.inf  # time when a worker last connected or sent anything
        self._listener: RingListener | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Accept workers. Raises DataError if another process listens in this folder, AccessRefused if the folder is open to
        other users."""
        self._listener = RingListener(self._folder / SOCKET, self._nonce)
        write_whole(self._folder / NONCE, self._nonce, mode=0o600)
        self._serving = asyncio.create_task(self._listener.serve(self._one_worker))

    async def submit(self, payload: bytes, *, deadline_s: float, read: Callable[[bytes], T]) -> list[T]:
        """Send `payload` to a worker and return the pieces of its answer, each passed through `read`, in the order sent.

        `deadline_s` limits the time that a worker takes once it has begun, and the time until a worker is connected. Time in
        the queue counts only if no worker sends anything for `deadline_s`. Raises:

        - DeadlineExceeded
        - WorkFailed, with the worker's cause
        - DataError, if the payload has more than REQUEST_BYTES
        - HubFull, if the pieces of all begun requests are more than the stash holds
        - any AtroposError that `read` raises"""
        if len(payload) > REQUEST_BYTES:
            raise DataError(
                f"a request of {len(payload):,} bytes is more than the {REQUEST_BYTES:,} that a worker's slot has room for.",
                remedy="Name what is long in it, by a path or a number, in place of sending it.",
            )
        one = _Request(next(self._ids), payload, deadline_s, asyncio.get_running_loop().create_future(), read)
        self._time(one)
        self._waiting.append(one)
        self._arrived.set()
        try:
            return await one.answer
        finally:
            if one.late is not None:
                one.late.cancel()
            one.answer.cancel()
            self._forget(one)
            if one in self._waiting:
                self._waiting.remove(one)

    def _time(self, one: _Request, deadline_s: float | None = None) -> None:
        """Start the request's deadline again from now."""
        if one.late is not None:
            one.late.cancel()
        wait_s = one.deadline_s if deadline_s is None else deadline_s
        one.late = asyncio.get_running_loop().call_later(wait_s, self._give_up, one)

    def _give_up(self, one: _Request) -> None:
        if one.answer.done():
            return
        who = f"no worker is connected at {self._folder}"
        if self.workers:
            who = f"{self.workers} workers are connected"
            if one in self._waiting:
                if (left_s := self._heard + one.deadline_s - asyncio.get_running_loop().time()) > 0:
                    self._time(one, left_s)
                    return
                who += ", and none has a free slot or sent anything meanwhile"
        text = f"no answer came through shared memory within {one.deadline_s:g} s; {who}."
        one.answer.set_exception(DeadlineExceeded(text))

    async def _one_worker(self, up: RingConsumer) -> None:
        try:
            greeting = json.loads(up.name)
            path, concurrency = Path(greeting["socket"]), int(greeting["concurrency"])
        except (ValueError, TypeError, LookupError):
            return  # not a worker
        begun: dict[int, _Request] = {}
        try:
            down = await RingProducer.open(
                path, self._nonce, slots=concurrency, slot_bytes=REQUEST_BYTES + META.size, name="exchange"
            )
        except AtroposError as error:
            console.warn(f"a worker (process {up.pid}) came and could not be given work: {Exception.__str__(error)}")
            return
        self.workers += 1
        self._heard = asyncio.get_running_loop().time()
        feeding = [asyncio.create_task(self._feed(down, begun)) for _ in range(concurrency)]
        try:
            await self._until_gone(up, begun)
        except AtroposError as error:
            console.warn(f"a worker (process {up.pid}) is shut out: {Exception.__str__(error)}")
        finally:
            self.workers -= 1
            down.close()
            for task in feeding:
                task.cancel()
            await asyncio.gather(*feeding, return_exceptions=True)
            self._request_again(begun)
            if path.parent.parent == self._folder:  # the worker's own folder, which a killed worker leaves behind
                shutil.rmtree(path.parent, ignore_errors=True)

    async def _until_gone(self, up: RingConsumer, begun: dict[int, _Request]) -> None:
        """Read a worker's answers until it is gone. Raises ProcessSilent if it is stopped for too long, and the ring's errors."""
        taking = asyncio.ensure_future(up.watch(lambda leases: self._take_all(leases, begun)))
        stopped = asyncio.ensure_future(stopped_too_long("a worker", up.pid, self._patience, lambda: bool(begun)))
        try:
            await asyncio.wait({taking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                raise stopped.result()
            await taking
        finally:
            taking.cancel()
            stopped.cancel()
            await asyncio.gather(taking, stopped, return_exceptions=True)

    async def _feed(self, down: RingProducer, begun: dict[int, _Request]) -> None:
        """Feed one slot of a worker: send the next request only after the last one was answered, however late.

        The slot is then free, so a request enters it at once and cannot become late while it waits for the slot."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            one = self._waiting.popleft()
            if one.answer.done():
                continue
            begun[one.id] = one
            self._time(one)
            try:
                await down.put([one.payload], meta=META.pack(one.id, PIECE), deadline_s=math.inf)
            except ProcessDied:
                return

    def _take_all(self, leases: list[SlotLease], begun: dict[int, _Request]) -> None:
        self._heard = asyncio.get_running_loop().time()
        for lease in leases:
            self._take(lease, begun)

    def _take(self, lease: SlotLease, begun: dict[int, _Request]) -> None:
        number, kind = META.unpack(lease.meta)
        one = begun.get(number)
        data = lease.copy()
        lease.release()
        if one is None or one.answer.done():
            self.unwanted += 1
            begun.pop(number, None)
        elif kind == PIECE:
            try:
                one.pieces.append(one.read(data))
            except AtroposError as error:
                one.answer.set_exception(error)
                return
            one.size_bytes += len(data)
            self.stashed_bytes += len(data)
            if self.stashed_bytes > self._stash_bytes:
                one.answer.set_exception(
                    HubFull(
                        f"{self.stashed_bytes:,} bytes have come of answers that are not whole, more than the stash's "
                        f"{self._stash_bytes:,}.",
                        remedy="Let fewer workers, or fewer groups of each (--concurrency), run at once, or raise the stash.",
                    )
                )
        elif kind == DONE:
            del begun[number]
            if int.from_bytes(data, "little") == len(one.pieces):
                one.answer.set_result(one.pieces)
            else:
                one.answer.set_exception(
                    DataError(f"an answer of {int.from_bytes(data, 'little')} pieces came in part")
                )
        else:
            del begun[number]
            one.answer.set_exception(WorkFailed(data.decode(errors="replace")))

    def _request_again(self, begun: dict[int, _Request]) -> None:
        for one in reversed(begun.values()):
            self._forget(one)
            if not one.answer.done():
                one.pieces, one.id = [], next(self._ids)
                self.requeued += 1
                self._waiting.appendleft(one)
                self._time(one)
                self._arrived.set()

    def _forget(self, one: _Request) -> None:
        self.stashed_bytes -= one.size_bytes
        one.size_bytes = 0

    async def close(self) -> None:
        """Close the rings, which tells the workers that no more work comes. May be called twice."""
        serving, self._serving = self._serving, None
        if serving is not None and self._listener is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            self._listener.close()
            (self._folder / NONCE).unlink(missing_ok=True)
