"""The consumer's end of a ring (`atropos_trajectory_client.shm.producer`): read messages in place, and answer them.

A message is a lease on its slot until `release`, which also sends the answer to the producer. Leases may be released in any order,
also after the producer has gone: the memory is freed with the last of them.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from atropos_core.errors import DataError
from atropos_trajectory_client.shm.segment import Slots
from atropos_trajectory_client.shm.socket import (
    ANSWER,
    ANSWERS,
    APART,
    BELL,
    FULL_S,
    IDLE_BELL,
    NUMBERS,
    RingSocket,
    refusal,
)

MESSAGE_BYTES = 64 << 20  # of one message, at most
_TAKE = 512  # messages that one look returns, or a few more


class SlotLease:
    """One message. `payload` is the producer's memory, read-only."""

    __slots__ = ("_ring", "key", "meta", "number", "payload")

    def __init__(self, number: int, key: str, meta: bytes, payload: memoryview, ring: RingConsumer) -> None:
        self.number = number
        self.key = key
        self.meta = meta
        self.payload = payload
        self._ring = ring

    def copy(self) -> bytes:
        """Return a copy of the payload."""
        return bytes(self.payload)

    def release(self, value: int = 0) -> None:
        """Answer with `value` and give the slot back. The producer will overwrite it, so copy first what you want to keep: an array
        that views the payload would change."""
        self.payload.release()
        self._ring.answer(self.number, value)

    def refuse(self, error: Exception) -> None:
        """Give the slot back; the producer's call raises `error`."""
        self.payload.release()
        self._ring.refuse(self.number, error)

    def __enter__(self) -> SlotLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.release()
        elif isinstance(error, Exception):
            self.refuse(error)  # after an interrupt, there is no answer


class RingConsumer:
    """One producer's messages, in the order in which they were sent."""

    def __init__(self, sock: RingSocket, slots: Slots, message_bytes: int, *, name: str, pid: int) -> None:
        self.name = name  # what the producer calls itself
        self.pid = pid
        self._socket = sock
        self._slots = slots
        self._message_bytes = message_bytes
        self._number = 0
        self._open: set[int] = set()  # numbers of messages that are leased
        self._answers: list[tuple[int, int]] = []
        self._refusals: list[bytes] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answer_due = False
        self._awaited = False  # the producer waits for answers
        self._many = max(slots.count // 4, 1)  # answers that go out all the same
        self._full = False  # the socket took no more when last tried
        self._waiting: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """True if the producer has gone, and everything that it had sent has been taken."""
        return self._socket.ended

    def take(self, deadline_s: float) -> list[SlotLease]:
        """Return messages, waiting for the first; none if none came in time, or the ring has `ended`. Also sends pending answers.
        Raises DataError, also in all later calls, if the producer breaks the protocol."""
        until = time.monotonic() + deadline_s
        while True:
            leases = self._take(1)
            self.send_answers()
            if leases or self.ended or not self._socket.wait(until - time.monotonic(), writing=self._full):
                return leases

    async def arrivals(self) -> AsyncIterator[list[SlotLease]]:
        """Yield messages as they come, until the producer has gone. Answers are sent in the loop's next turn."""
        loop = self._loop = asyncio.get_running_loop()
        while True:
            leases = self._take(_TAKE)
            self.send_answers()
            if leases:
                yield leases
                await asyncio.sleep(0)  # a producer that never pauses must not keep the loop to itself
            elif self.ended:
                return
            else:
                self._waiting = loop.create_future()
                await readable(loop, self._socket.fileno(), self._waiting)

    async def watch(self, handle: Callable[[list[SlotLease]], None]) -> None:
        """Call `handle` with messages as they come, until the producer has gone. This takes one turn of the loop, `arrivals` takes
        three: for callers that answer in the same call. Raises what `handle` raises, and DataError as `take`."""
        loop = self._loop = asyncio.get_running_loop()
        ended, descriptor = loop.create_future(), self._socket.fileno()
        self._waiting = ended
        failure: Exception | None = None

        def look() -> None:
            nonlocal failure
            self._answer_due = True  # what `handle` answers goes out below
            try:
                if leases := self._take(1):  # one datagram: where more wait, the loop is back here in its next turn
                    handle(leases)
                self.send_answers()
            except Exception as error:  # noqa: BLE001 - raised to the caller that awaits this
                failure = error
            finally:
                self._answer_due = False
            if failure is not None or self.ended:
                unwatch()
                _settle(ended)
            elif self._full:
                self._answer_soon(FULL_S)

        def unwatch() -> None:
            if self._socket.fileno() == descriptor:  # a socket that was closed left its number to another
                loop.remove_reader(descriptor)

        loop.add_reader(descriptor, look)
        try:
            look()
            await ended
        finally:
            unwatch()
        if failure is not None:
            raise failure

    def _take(self, messages: int) -> list[SlotLease]:
        """Return what has arrived, without waiting: whole datagrams, up to this many messages."""
        leases: list[SlotLease] = []
        try:
            while len(leases) < messages and (datagram := self._socket.receive()) is not None:
                data, descriptors = datagram
                try:
                    if (kind := data[:1]) == BELL or kind == IDLE_BELL:
                        self._awaited = kind == BELL
                        for slot in array("I", data[1:]):
                            leases.append(self._lease(self._slots, slot))
                    elif kind == APART and descriptors:
                        self._awaited = True
                        leases.append(self._lease(self._apart(data, descriptors[0]), 0))
                    else:
                        raise DataError(f"producer {self.name!r} sent a datagram of an unknown kind {kind!r}")
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except DataError:
            self.close()
            raise
        return leases

    def _lease(self, slots: Slots, slot: int) -> SlotLease:
        number = self._number = self._number + 1
        payload, key, meta = slots.read(slot, number)
        self._open.add(number)
        return SlotLease(number, key.decode(errors="replace") if key else "", meta, payload, self)

    def _apart(self, data: bytes, descriptor: int) -> Slots:
        size = int.from_bytes(data[1:9], "little")
        if size > self._message_bytes + 64:
            raise DataError(f"a message of {size:,} bytes is more than the {self._message_bytes:,} that are taken here")
        return Slots.attach(descriptor, 1, size)

    # -- answers

    def answer(self, number: int, value: int) -> None:
        self._close_lease(number)
        self._answers.append((number, value))
        self._answer_soon()

    def refuse(self, number: int, error: Exception) -> None:
        self._close_lease(number)
        self._refusals.append(refusal(number, error))
        self._answer_soon()

    def _close_lease(self, number: int) -> None:
        if number not in self._open:
            raise DataError(
                f"message {number} of {self.name!r} was answered twice: its slot is another message's by now"
            )
        self._open.remove(number)

    def _answer_soon(self, after_s: float = 0.0) -> None:
        if self._loop is not None and not self._answer_due and self._are_due():
            self._answer_due = True
            self._loop.call_later(after_s, self._answer_now) if after_s else self._loop.call_soon(self._answer_now)

    def _answer_now(self) -> None:
        self._answer_due = False
        self.send_answers()
        if self._full and not self.ended:
            self._answer_soon(FULL_S)

    def _are_due(self) -> bool:
        return self._awaited or bool(self._refusals) or len(self._answers) >= self._many

    def send_answers(self, *, now: bool = False) -> None:
        """Send the answers that the producer waits for, or all. Never waits: answers that the socket does not take are sent with the
        next."""
        self._full = False
        if self.ended:
            self._answers.clear()
            self._refusals.clear()
        if not (now or self._are_due()):
            return
        while self._answers and not self._full:
            some = self._answers[:NUMBERS]
            self._full = not self._socket.send(ANSWERS + b"".join(ANSWER.pack(*one) for one in some))
            if not self._full:
                del self._answers[: len(some)]
        while self._refusals and not self._full:
            self._full = not self._socket.send(self._refusals[0])
            if not self._full:
                del self._refusals[0]

    def close(self) -> None:
        """Hang up: the producer notices at once. Leases in use stay readable."""
        if not self.ended:
            self.send_answers(now=True)
        if self._loop is not None and (descriptor := self._socket.fileno()) >= 0:
            self._loop.remove_reader(descriptor)
        self._socket.close()
        self._slots.close()
        if self._waiting is not None:
            _settle(self._waiting)


async def readable(
    loop: asyncio.AbstractEventLoop, descriptor: int, future: asyncio.Future[None] | None = None
) -> None:
    """Wait for something to read. The loop watches only meanwhile, so that unread data does not wake it for nothing."""
    future = future or loop.create_future()
    loop.add_reader(descriptor, _settle, future)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
