"""The endpoint for producers on the server's machine: groups through shared memory (`atropos_trajectory_client.shm.producer`), no HTTP.

`GET /v1` gives its path, with a nonce. A worker that finds the path and is let in uses it; any other worker continues over HTTP. A
message is one frame, with its idempotency key and the worker's id. The answer is the group's id in the hub, or the error that HTTP
would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from atropos_core import console
from atropos_core.errors import AtroposError, DataError, HubClosed
from atropos_http_server.body_limits import Budget
from atropos_trajectory_api.groups.frame_check import has_long_header
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.service import Service
from atropos_trajectory_client.shm.consumer import RingConsumer, SlotLease
from atropos_trajectory_client.shm.listener import RingListener

ROUTE = "ring"  # in metrics, instead of HTTP's path
HOLD_S = 20.0  # how long a group may wait for room before its worker gets an answer
WAITING = 8  # groups of one ring that may wait for room outside its slots
TURN_GROUPS, TURN_BYTES = 16, 1 << 20  # of one ring, before others get a turn: about a millisecond


@contextlib.asynccontextmanager
async def listening(
    service: Service, options: ServeOptions, budget: Budget, *, hold_s: float = HOLD_S
) -> AsyncIterator[None]:
    """Accept rings, and announce them in `service.same_host`. If that is not possible, one line says why, and HTTP remains.
    `budget` is that of the bodies that HTTP reads."""
    path = options.directory.resolve() / "rings" / "ring.sock"
    nonce = secrets.token_hex(16)
    try:
        if not hasattr(os, "memfd_create"):
            raise DataError("this system has no memfd")
        listener = RingListener(path, nonce, message_bytes=int(options.body_mb * 1e6))
    except (AtroposError, OSError) as error:
        console.warn(f"no shared memory for producers on this machine, which use HTTP instead: {error}")
        yield
        return
    receiver = RingReceiver(service, budget, hold_s)
    serving = asyncio.create_task(listener.serve(receiver.handle))
    service.same_host = {"path": str(path), "nonce": nonce}

    def ended(serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            service.same_host = None
            console.warn(f"shared memory for producers on this machine has ended; they use HTTP instead: {error!r}")

    serving.add_done_callback(ended)
    try:
        yield
    finally:
        service.same_host = None
        listener.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class RingReceiver:
    """Puts groups that arrive over rings into the hub."""

    def __init__(self, service: Service, budget: Budget, hold_s: float) -> None:
        self.service = service
        self.budget = budget
        self.hold_s = hold_s

    async def handle(self, ring: RingConsumer) -> None:
        """Serve one producer until it ends. What it had sent by then is still taken."""
        intake = Intake(self, ring)
        try:
            await ring.watch(intake.take)
            await intake.finish()
        except DataError as error:
            console.warn(f"the ring of {ring.name!r} (pid {ring.pid}) is closed: {Exception.__str__(error)}")
        finally:
            intake.cancel()


class Intake:
    """The groups of one ring, in the order of arrival. If there is room for a group, it is in the hub within the turn of the event
    loop that its doorbell started, and answered at the end of that turn. Only groups that must wait get tasks."""

    def __init__(self, receiver: RingReceiver, ring: RingConsumer) -> None:
        self._receiver = receiver
        self._service = receiver.service
        self._ring = ring
        self._arrived: deque[SlotLease] = deque()
        self._waiting: set[asyncio.Task[None]] = set()  # each is one group that waits for room
        self._syncing: set[asyncio.Task[None]] = set()  # each is some groups in the hub that are not yet on the disk
        self._turn_due = False
        self._idle = asyncio.Event()

    def take(self, leases: list[SlotLease]) -> None:
        self._arrived.extend(leases)
        if not self._turn_due:
            self._work()

    async def finish(self) -> None:
        """Called when nothing waits any more."""
        while self._arrived or self._waiting or self._syncing:
            self._idle.clear()
            await self._idle.wait()

    def cancel(self) -> None:
        self._arrived.clear()
        for task in (*self._waiting, *self._syncing):
            task.cancel()

    def _work(self) -> None:
        """Take as many groups as fit into one turn; other rings get theirs before the next."""
        self._turn_due = False
        started, size, stored = time.monotonic(), 0, list[tuple[SlotLease, int]]()
        while self._arrived and len(self._waiting) < WAITING:
            if len(stored) >= TURN_GROUPS or size >= TURN_BYTES:
                self._turn_due = True
                asyncio.get_running_loop().call_soon(self._work)
                break
            lease = self._arrived.popleft()
            nbytes = lease.payload.nbytes
            size += nbytes
            if self._waiting or not self._receiver.budget.has_room(nbytes):
                self._put_later(lease)
                continue
            try:
                number = self._try_put(lease)
            except HubClosed:
                self._ring.close()  # the server ends: the worker sends the group again, to the next one
                return
            except Exception as error:  # noqa: BLE001 - every error goes to the worker, and the others continue
                self._refuse(lease, error, started, nbytes)
                continue
            if number is None:
                self._put_later(lease)
            else:
                stored.append((lease, number))
        if not self._service.durable_at_once and stored:
            self._spawn(self._syncing, self._release_on_disk(stored, started, size))
            stored = []
        self._release(stored)
        self._ring.send_answers()
        self._count(len(stored), started, size)  # while the worker reads its answers

    def _release(self, stored: list[tuple[SlotLease, int]]) -> None:
        for lease, number in stored:
            lease.release(number)

    def _count(self, calls: int, started: float, size: int) -> None:
        if calls:
            passed = time.monotonic() - started
            self._service.counters.request(ROUTE, self._ring.name, passed, 200, size, 0, calls=calls)

    async def _release_on_disk(self, stored: list[tuple[SlotLease, int]], started: float, size: int) -> None:
        try:
            await self._service.written()
        except Exception as error:  # noqa: BLE001 - as above
            for lease, _ in stored:
                self._refuse(lease, error, started, 0)
            return
        self._release(stored)
        self._count(len(stored), started, size)

    def _try_put(self, lease: SlotLease) -> int | None:
        """The group's id, or None if it must wait for room or takes long to read."""
        frame = lease.copy()
        if has_long_header(frame):
            return None
        return self._service.try_put(frame, self._service.read(frame), key=lease.key, worker=_sender(lease))

    def _put_later(self, lease: SlotLease) -> None:
        self._spawn(self._waiting, self._put(lease))

    def _spawn(self, among: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(lambda task: self._ended(task, among))

    def _ended(self, task: asyncio.Task[None], among: set[asyncio.Task[None]]) -> None:
        among.discard(task)
        self._idle.set()
        if self._arrived and not self._turn_due and not task.cancelled():
            self._work()

    async def _put(self, lease: SlotLease) -> None:
        """Wait for room. The group stays in its slot as long as the budget for bodies has no room for it."""
        started, size = time.monotonic(), lease.payload.nbytes
        share = self._receiver.budget.share()
        try:
            await self._receiver.budget.take(share, size, self._receiver.hold_s)
            left = max(self._receiver.hold_s - (time.monotonic() - started), 0.001)
            frame = lease.copy()
            checked = await self._service.read_aside(frame)
            number = await self._service.put(frame, checked, key=lease.key, worker=_sender(lease), deadline_s=left)
            self._release([(lease, number)])
            self._count(1, started, size)
        except HubClosed:
            self._ring.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(lease, error, started, size)
        finally:
            share.end()

    def _refuse(self, lease: SlotLease, error: Exception, started: float, size: int) -> None:
        known = isinstance(error, AtroposError)
        lease.refuse(error)
        self._service.counters.request(
            ROUTE, self._ring.name, time.monotonic() - started, 503 if known else 500, size, 0
        )
        if not known:  # our own error: the worker gets its name, the log its traceback
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a group of the ring of {self._ring.name!r} was not taken", "exception": error}
            )


def _sender(lease: SlotLease) -> str:
    return lease.meta.decode(errors="replace")
