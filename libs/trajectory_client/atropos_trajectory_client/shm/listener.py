"""The listener for producers, in the process that reads their rings: a Unix socket in a private directory of one user.

A producer must be of the same user (the kernel tells) and know the nonce, which proves that both mean the same server: a path can lead
elsewhere in another container. Others get the reason, and use HTTP instead.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from atropos_core.errors import AccessRefused, ApiError, AtroposError, DataError, DeadlineExceeded, ProcessDied
from atropos_trajectory_client.shm.consumer import MESSAGE_BYTES, RingConsumer, readable
from atropos_trajectory_client.shm.segment import LAYOUT, Slots
from atropos_trajectory_client.shm.socket import HELLO, WELCOME, RingSocket, listen, refusal, wait_for

HELLO_DEADLINE_S = 5.0
SEGMENT_BYTES = 1 << 30  # of one producer's slots, at most
RINGS = 256


class RingListener:
    """Accepts producers of this user that know the nonce."""

    def __init__(
        self, path: Path, nonce: str, *, message_bytes: int = MESSAGE_BYTES, segment_bytes: int = SEGMENT_BYTES,
        rings: int = RINGS,
    ) -> None:  # fmt: skip
        self.path = path
        self._nonce = nonce
        self._message_bytes = message_bytes
        self._segment_bytes = segment_bytes
        self._rings = rings
        self._socket = listen(path, rings)
        self._file = path.stat().st_ino

    def accept(self, deadline_s: float) -> RingConsumer | None:
        """Return the next producer, or None if none came in time. Raises the error with which a producer was refused."""
        until = time.monotonic() + deadline_s
        if not wait_for(self._socket, deadline_s):
            return None
        sock, _ = self._socket.accept()
        end = RingSocket(sock)
        if not end.wait(min(until - time.monotonic(), HELLO_DEADLINE_S)):
            end.close()
            raise DeadlineExceeded("a producer connected and did not say who it is")
        return self._admit(end)

    async def next(self, deadline_s: float) -> RingConsumer | None:
        """Like `accept`, without blocking the event loop. Cancelling it leaves nothing open."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                await readable(loop, self._socket.fileno())
        except TimeoutError:
            return None
        sock, _ = self._socket.accept()
        return await self._greeted(RingSocket(sock))

    async def serve(self, handle: Callable[[RingConsumer], Awaitable[None]]) -> None:
        """Accept producers until cancelled, and `handle` each in its own task; its ring is closed when that ends. An exception of
        `handle` ends only that ring, and goes to the loop's exception handler with the producer's name."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        is_refused = False  # no connection could be taken when last tried
        try:
            while True:
                await readable(loop, self._socket.fileno())
                try:
                    sock, _ = self._socket.accept()
                except (BlockingIOError, ConnectionAbortedError):  # it has gone again
                    continue
                except OSError as error:  # this process has no descriptors left, for one
                    if not is_refused:
                        _report(f"no ring can be taken at {self.path} now; it is tried on", error)
                    is_refused = True
                    await asyncio.sleep(0.1)
                    continue
                is_refused = False
                end = RingSocket(sock)
                if len(tasks) >= self._rings:
                    end.send(
                        refusal(0, ApiError(f"{self.path} serves {self._rings} rings already, which is its limit"))
                    )
                    end.close()
                    continue
                task = loop.create_task(self._one(end, handle))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # cancelled, each of them; `_one` reports all else

    async def _one(self, end: RingSocket, handle: Callable[[RingConsumer], Awaitable[None]]) -> None:
        try:
            ring = await self._greeted(end)
        except AtroposError:
            return  # a producer that was refused has got the reason
        except Exception as error:  # noqa: BLE001 - one producer's ring cannot be had; others still can
            _report(f"a ring at {self.path} could not be opened", error)
            return
        try:
            await handle(ring)
        except Exception as error:  # noqa: BLE001 - this task is not awaited: the producer sees its ring end, the log says why
            _report(f"the ring of {ring.name!r} (pid {ring.pid}) is closed: its handler failed", error)
        finally:
            ring.close()

    async def _greeted(self, end: RingSocket) -> RingConsumer:
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                await readable(asyncio.get_running_loop(), end.fileno())
            return self._admit(end)
        except TimeoutError:
            end.close()
            raise DeadlineExceeded("a producer connected and did not say who it is") from None
        except BaseException:
            end.close()
            raise

    def _admit(self, end: RingSocket) -> RingConsumer:
        descriptors: list[int] = []
        try:
            first = end.receive()
            if first is None:
                raise ProcessDied("a producer connected and went away")
            data, descriptors = first
            pid, user = end.peer()
            slots, name = self._checked(data, descriptors, user)
            end.send(WELCOME.pack(self._message_bytes))
            return RingConsumer(end, slots, self._message_bytes, name=name, pid=pid)
        except AtroposError as error:
            end.send(refusal(0, error))
            end.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _checked(self, data: bytes, descriptors: list[int], user: int) -> tuple[Slots, str]:
        if user != os.geteuid():
            raise AccessRefused(f"a process of user {user} may not send to one of user {os.geteuid()} through memory")
        try:
            said = json.loads(data[1:]) if data[:1] == HELLO and len(descriptors) == 1 else {}
            layout, nonce, name = int(said["layout"]), str(said["nonce"]), str(said["name"])
            count, slot_bytes = int(said["slots"]), int(said["slot_bytes"])
            known = hmac.compare_digest(nonce.encode(), self._nonce.encode())
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            raise DataError(f"invalid greeting from a producer: {data[:40]!r}") from None
        if not known:
            raise AccessRefused(f"{name!r} means another server, or this one before it was started again")
        if layout != LAYOUT:
            raise DataError(f"{name!r} writes slots in layout {layout}, this process reads layout {LAYOUT}")
        if count * slot_bytes > self._segment_bytes:
            raise DataError(
                f"{name!r} asks for {count} slots of {slot_bytes:,} bytes; a ring may have {self._segment_bytes:,} bytes"
            )
        return Slots.attach(descriptors[0], count, slot_bytes), name

    def close(self) -> None:
        """Accept no more producers. The socket's file is removed, if it is still this listener's."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        try:
            if self.path.stat().st_ino == self._file:
                self.path.unlink()
        except FileNotFoundError:
            pass


def _report(message: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
