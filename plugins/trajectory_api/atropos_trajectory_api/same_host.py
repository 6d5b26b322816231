"""The door for producers on the server's own machine: groups through shared memory (`atropos_core.ring`), no HTTP.

`GET /v1` tells where it is, with a nonce; a worker that finds the path there and is let in uses it, any other goes on over
HTTP. A message is one frame, with its idempotency key and the worker's id beside it; the answer is the group's id in the
hub, or the error that HTTP would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator

from atropos_core import console
from atropos_core.errors import AtroposError, DataError, HubClosed
from atropos_core.ring_consumer import Lease, RingConsumer
from atropos_core.ring_listener import RingListener
from atropos_trajectory_api.config import ServeOptions
from atropos_trajectory_api.limits import Budget
from atropos_trajectory_api.service import Service

ROUTE = "ring"  # in metrics, where HTTP has a path
HOLD_S = 20.0  # that a group may wait for room before its worker is told
WAITING = 8  # groups of one ring that may wait for room outside its slots


@contextlib.asynccontextmanager
async def listening(
    service: Service, options: ServeOptions, budget: Budget, *, hold_s: float = HOLD_S
) -> AsyncIterator[None]:
    """Take rings, and say so in `service.same_host`. Where that cannot be, one line says why, and HTTP remains. `budget`
    is that of the bodies that HTTP reads."""
    path = options.directory.resolve() / "rings" / "ring.sock"
    nonce = secrets.token_hex(16)
    try:
        if not hasattr(os, "memfd_create"):
            raise DataError("this system has no memfd")
        listener = RingListener(path, nonce, message_bytes=int(options.body_mb * 1e6))
    except (AtroposError, OSError) as error:
        console.warn(f"no shared memory for producers on this machine, who use HTTP: {error}")
        yield
        return
    door = Door(service, budget, hold_s)
    serving = asyncio.create_task(listener.serve(door.handle))
    service.same_host = {"path": str(path), "nonce": nonce}
    try:
        yield
    finally:
        service.same_host = None
        listener.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class Door:
    """Puts what comes over rings into the hub."""

    def __init__(self, service: Service, budget: Budget, hold_s: float) -> None:
        self._service = service
        self._budget = budget
        self._hold_s = hold_s

    async def handle(self, ring: RingConsumer) -> None:
        """One producer, until it ends; what it had sent by then is still taken."""
        room = asyncio.Semaphore(WAITING)
        puts: set[asyncio.Task[None]] = set()
        try:
            async for leases in ring.arrivals():
                for lease in leases:
                    await room.acquire()
                    put = asyncio.create_task(self._put(ring, lease))
                    puts.add(put)
                    put.add_done_callback(puts.discard)
                    put.add_done_callback(lambda _: room.release())
                    await asyncio.sleep(0)  # it goes as far as it can, in the order of arrival; then others have a turn
            await asyncio.gather(*puts, return_exceptions=True)
        except DataError as error:
            console.warn(f"the ring of {ring.name!r} (pid {ring.pid}) is closed: {Exception.__str__(error)}")
        finally:
            for put in puts:
                put.cancel()

    async def _put(self, ring: RingConsumer, lease: Lease) -> None:
        started, size, worker = time.monotonic(), lease.payload.nbytes, lease.meta.decode(errors="replace")
        share = self._budget.share()
        status = 200
        try:
            await self._budget.take(share, size, self._hold_s)  # until then it stays in its slot
            left = self._hold_s - (time.monotonic() - started)
            number = await self._service.put(lease.copy(), key=lease.key, worker=worker, deadline_s=max(left, 0.001))
            lease.release(number)
        except HubClosed:
            ring.close()  # the server ends: the worker sends it again, to the next one
        except Exception as error:
            status = 503 if isinstance(error, AtroposError) else 500
            lease.refuse(error)
            if not isinstance(error, AtroposError):
                raise  # a fault of ours: the worker has its name, the log its traceback
        finally:
            share.end()
            self._service.observed.request(ROUTE, ring.name, time.monotonic() - started, status, size, 0)
