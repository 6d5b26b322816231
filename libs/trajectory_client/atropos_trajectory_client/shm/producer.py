"""Messages from one process to another on the same machine, through shared memory: the producer's end.

The producer owns the slots (`atropos_trajectory_client.shm.segment`) and passes their descriptor over a Unix socket, once. After that
the socket only carries numbers: which slots are full (the doorbell), and which messages the consumer has answered, which also frees
their slots (the credits). If either end is behind, many numbers travel in one datagram. There is no polling: both ends wait on the
socket, and the end of one process is the end of file at the other.

    producer:  ring = RingProducer.connect(path, nonce); ring.send([payload], key="a"); ring.flush()
    or:        ring = await RingProducer.open(path, nonce); await ring.put([payload], key="a")
    consumer:  ring = RingListener(path, nonce).accept(deadline_s=10)                         # atropos_trajectory_client.shm.listener
               for lease in ring.take(deadline_s=1): use(lease.payload); lease.release()      # atropos_trajectory_client.shm.consumer

A message that is larger than a slot travels in its own segment, one at a time. One ring has one producer, used by one thread or event
loop. Messages that were not answered when a ring ends may or may not have arrived: send them again under the same key.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atropos_core.codec import Buffer
from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, ProcessDied
from atropos_trajectory_client.shm.consumer import readable
from atropos_trajectory_client.shm.segment import LAYOUT, Slots
from atropos_trajectory_client.shm.socket import (
    ANSWER,
    ANSWERS,
    APART,
    BELL,
    FULL_S,
    IDLE_BELL,
    NUMBERS,
    REFUSED,
    WELCOME,
    RingSocket,
    hello,
    rebuilt,
)

CONNECT_DEADLINE_S = 5.0
DEADLINE_S = 60.0
SLOTS, SLOT_BYTES = 64, 1 << 20  # a worker's default: 64 MiB at most, of which only slots in use take memory
SPIN_S = 200e-6  # at most; an answer that comes so soon is waited for without sleep
TURN_S = 1e-3  # without a turn for others on the loop
BELL_EVERY = 32  # messages that `send` lets wait for one doorbell

_NO_SLOT = -1
_ANSWERS_AT_ONCE = 4  # datagrams that are looked at after a doorbell, so that they never pile up


@dataclass(frozen=True, slots=True)
class Ack:
    """The consumer's answer to one message: the value given to `release`, or the reason for a refusal."""

    number: int
    value: int = 0
    error: AtroposError | None = None


class RingProducer:
    """The producer's end. `on_ack` gets every answer; without it, a refusal is raised by the next `send` or `flush`."""

    def __init__(self, sock: RingSocket, slots: Slots, message_bytes: int, *, checksum: bool = False) -> None:
        self.message_bytes = message_bytes  # that the consumer takes at most
        self.answered = 0
        self.on_ack: Callable[[Ack], None] | None = None
        self.error: AtroposError | None = None  # why the ring has ended
        self._socket = sock
        self._slots = slots
        self._checksum = checksum
        self._free = list(range(slots.count))  # last in, first out: what is in the cache is written next
        self._held: dict[int, int] = {}  # number of a message -> its slot, or _NO_SLOT
        self._apart = False  # a message is travelling in its own segment
        self._few = slots.count * 3 // 4  # free slots at which answers are looked for: the consumer keeps some back
        self._bell = array("I")  # slots that the consumer was not notified of
        self._full = False  # the socket took no more when last tried
        self._number = 0
        self._refusal: AtroposError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[int, asyncio.Future[Ack]] = {}
        self._bell_due = False
        self._is_quick = False  # the last answer to a single message came within SPIN_S
        self._turned = 0.0  # when others on the loop last had a turn
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    @classmethod
    def connect(
        cls, path: Path, nonce: str, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, name: str = "",
        checksum: bool = False, deadline_s: float = CONNECT_DEADLINE_S,
    ) -> RingProducer:  # fmt: skip
        """Connect to the listener at `path`. `name` identifies this producer. Raises ProcessDied if there is no listener, AccessRefused
        for another user or another nonce, DeadlineExceeded."""
        until = time.monotonic() + deadline_s
        with _greeted(path, nonce, slots, slot_bytes, name) as (sock, segment):
            while (message_bytes := _welcomed(sock, path)) is None:
                if not sock.wait(until - time.monotonic()):
                    raise _no_answer(path, deadline_s)
            return cls(sock, segment, message_bytes, checksum=checksum)

    @property
    def unanswered(self) -> int:
        return len(self._held)

    # -- blocking use

    def send(
        self, buffers: Sequence[Buffer], *, key: str = "", meta: bytes = b"", deadline_s: float = DEADLINE_S
    ) -> int:
        """Write a message, waiting for a free slot, and return its number. It is sent by `ring`, `flush`, or after BELL_EVERY messages.
        Raises DeadlineExceeded, ProcessDied if the consumer has gone, DataError for a message that it would never take."""
        number = self._try(buffers, key, meta)
        if number is None:
            until = time.monotonic() + deadline_s
            while (number := self._try(buffers, key, meta)) is None:
                self._wait(until, "no slot became free", deadline_s)
        if len(self._bell) >= BELL_EVERY:
            self.ring()
        self._raise_refusal()
        return number

    def ring(self) -> None:
        """Tell the consumer now what was written. Never waits: what the socket does not take is sent with the next."""
        self._notify()
        os.sched_yield()  # Linux may have woken the consumer on this core, and it would then wait for the end of our time slice
        if len(self._free) <= self._few:
            self._collect(_ANSWERS_AT_ONCE)

    def flush(self, deadline_s: float = DEADLINE_S) -> None:
        """Wait until everything that was sent has been answered. Raises the first refusal, DeadlineExceeded, ProcessDied."""
        until = time.monotonic() + deadline_s
        self.ring()
        while self._held:
            self._wait(until, f"{len(self._held)} messages were not answered", deadline_s)
        self._raise_refusal()

    def _wait(self, until: float, what: str, deadline_s: float) -> None:
        if self.error is not None:
            raise self.error
        self._notify(BELL)  # and no look at answers: what they free would be waited for
        if not self._socket.wait(until - time.monotonic(), writing=self._full):
            raise DeadlineExceeded(f"{what} within {deadline_s:g} s: the consumer of this ring is behind")
        self._collect()

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    # -- asyncio use

    @classmethod
    async def open(
        cls, path: Path, nonce: str, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, name: str = "",
        deadline_s: float = CONNECT_DEADLINE_S,
    ) -> RingProducer:  # fmt: skip
        """Like `connect`, without blocking the event loop. Cancelling it leaves nothing open."""
        with _greeted(path, nonce, slots, slot_bytes, name) as (sock, segment):
            try:
                async with asyncio.timeout(deadline_s):
                    while (message_bytes := _welcomed(sock, path)) is None:
                        await readable(asyncio.get_running_loop(), sock.fileno())
            except TimeoutError:
                raise _no_answer(path, deadline_s) from None
            return cls(sock, segment, message_bytes)

    async def put(
        self, buffers: Sequence[Buffer], *, key: str = "", meta: bytes = b"", deadline_s: float = DEADLINE_S
    ) -> Ack:
        """Send one message and wait for its answer; first come, first served if slots are short. Raises the consumer's refusal,
        DeadlineExceeded, ProcessDied, DataError.

        The loop itself waits for the answer to a single message, SPIN_S at most, if the last one came that fast: for two processes,
        sleeping and waking each other takes longer than the message."""
        loop = self._attached()
        number: int | None = None
        try:
            if not self._held and not self._turn.locked() and (number := self._try(buffers, key, meta)) is not None:
                ack = await self._answer_to_one(loop, number, deadline_s)
            else:
                self._is_quick = False
                async with asyncio.timeout(deadline_s):
                    async with self._turn:
                        self._room.clear()
                        while (number := self._try(buffers, key, meta)) is None:
                            if self._full:
                                self._ring_soon(loop, FULL_S)
                            await self._room.wait()
                            self._room.clear()
                    future = self._futures[number] = loop.create_future()
                    self._ring_soon(loop)
                    ack = await future
        except TimeoutError:
            what = "no slot became free" if number is None else f"message {number} was not answered"
            raise DeadlineExceeded(f"{what} within {deadline_s:g} s: the consumer of this ring is behind") from None
        finally:
            if number is not None:
                self._futures.pop(number, None)
        if ack.error is not None:
            raise ack.error
        return ack

    async def _answer_to_one(self, loop: asyncio.AbstractEventLoop, number: int, deadline_s: float) -> Ack:
        """Wait for the answer to a message when no other is pending."""
        future: asyncio.Future[Ack] = loop.create_future()
        self._futures[number] = future
        sent = time.monotonic()
        if not self._notify(BELL):
            self._ring_soon(loop)
        elif self._is_quick:
            while not future.done() and time.monotonic() - sent < SPIN_S:
                os.sched_yield()  # the consumer may have been woken on this very core
                self._collect(1)
        if not future.done():
            async with asyncio.timeout(deadline_s):
                await future
            self._turned = time.monotonic()
        elif sent - self._turned > TURN_S:
            await asyncio.sleep(0)
            self._turned = time.monotonic()
        self._is_quick = time.monotonic() - sent < SPIN_S
        return await future

    def _attached(self) -> asyncio.AbstractEventLoop:
        if self._loop is None and self.error is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._collect, 1)
        return asyncio.get_running_loop()

    def _ring_soon(self, loop: asyncio.AbstractEventLoop, after_s: float = 0.0) -> None:
        if not self._bell_due:
            self._bell_due = True
            loop.call_later(after_s, self._ring_now, loop) if after_s else loop.call_soon(self._ring_now, loop)

    def _ring_now(self, loop: asyncio.AbstractEventLoop) -> None:
        self._bell_due = False
        if self.error is None:
            self._notify(BELL)
            self._room.set()
            if self._full:
                self._ring_soon(loop, FULL_S)

    # -- both

    def _try(self, buffers: Sequence[Buffer], key: str, meta: bytes) -> int | None:
        """Write the message if there is room, and return its number."""
        if self.error is not None:
            raise self.error
        sizes = [len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes for buffer in buffers]
        name = key.encode()
        size = sum(sizes) + len(name) + len(meta)
        number = self._number + 1
        if size > self._slots.slot_bytes:
            if not self._send_apart(number, buffers, sizes, name, meta, size):
                return None
        else:
            if not self._free:
                return None
            slot = self._free.pop()
            try:
                self._slots.write(slot, number, buffers, sizes, name, meta, self._checksum)
            except BaseException:
                self._free.append(slot)  # a buffer that is not contiguous; the consumer was not notified of the slot
                raise
            self._held[number] = slot
            self._bell.append(slot)
        self._number = number
        return number

    def _send_apart(
        self, number: int, buffers: Sequence[Buffer], sizes: Sequence[int], key: bytes, meta: bytes, size: int
    ) -> bool:
        if size > self.message_bytes:
            raise DataError(
                f"a message of {size:,} bytes is more than the {self.message_bytes:,} that the consumer takes"
            )
        if self._apart or not self._notify():
            return False  # one at a time, so that memory is bounded; and what was written earlier arrives earlier
        segment, descriptor = Slots.create(1, size)
        try:
            segment.write(0, number, buffers, sizes, key, meta, self._checksum)
            self._full = not self._socket.send(APART + segment.slot_bytes.to_bytes(8, "little"), [descriptor])
            if self._full:
                return False
        finally:
            os.close(descriptor)
        self._held[number], self._apart = _NO_SLOT, True
        return True

    def _notify(self, bell: bytes = IDLE_BELL) -> bool:
        """Announce what was written. Return True if all of it was sent. A BELL is sent even with nothing new, to ask for answers."""
        rang = bell == IDLE_BELL
        while self._bell or not rang:
            self._full = not self._socket.send(bell + self._bell[:NUMBERS].tobytes())
            if self._full:
                return False
            del self._bell[:NUMBERS]
            rang = True
        self._full = False
        return True

    def _collect(self, datagrams: int = 1 << 30) -> None:
        """Read answers; their slots become free."""
        while datagrams and (datagram := self._socket.receive()) is not None:
            datagrams -= 1
            self._room.set()
            data, _ = datagram
            if data[:1] == ANSWERS:
                for number, value in ANSWER.iter_unpack(memoryview(data)[1:]):
                    self._answer(number, value)
            elif data[:1] == REFUSED:
                number = int.from_bytes(data[1:9], "little")
                self._answer(number, 0, rebuilt(data))
        if self._socket.ended and self.error is None:
            self._end(ProcessDied("the consumer of this ring has gone away"))

    def _answer(self, number: int, value: int, error: AtroposError | None = None) -> None:
        slot = self._held.pop(number)
        if slot == _NO_SLOT:
            self._apart = False
        else:
            self._free.append(slot)
        self.answered += 1
        future = self._futures.get(number)
        if future is not None:
            if not future.done():
                future.set_result(Ack(number, value, error))
        elif self.on_ack is not None:
            self.on_ack(Ack(number, value, error))
        elif error is not None and self._loop is None:
            self._refusal = self._refusal or error

    def close(self) -> None:
        """Hang up. Unanswered messages may still arrive: the consumer reads what it was notified of."""
        if self.error is None:
            self._notify()
        self._end(ProcessDied("this ring was closed"))

    def _end(self, error: AtroposError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._slots.close()
        self._room.set()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: a caller that was cancelled meanwhile never asks


@contextmanager
def _greeted(path: Path, nonce: str, slots: int, slot_bytes: int, name: str) -> Iterator[tuple[RingSocket, Slots]]:
    """Yield a connection whose other end knows the producer, and has the slots. Both are closed if the block raises."""
    with ExitStack() as undo:
        undo.callback((sock := RingSocket.connect(path)).close)
        segment, descriptor = Slots.create(slots, slot_bytes)
        undo.callback(segment.close)
        try:
            who = {"layout": LAYOUT, "nonce": nonce, "slots": slots, "slot_bytes": segment.slot_bytes, "name": name}
            sock.send(hello(who), [descriptor])
        finally:
            os.close(descriptor)
        yield sock, segment
        undo.pop_all()


def _welcomed(sock: RingSocket, path: Path) -> int | None:
    """Return the largest message that the other end takes, or None if it has sent nothing yet. Raises its refusal."""
    answer = sock.receive()
    if answer is None:
        if sock.ended:
            raise ProcessDied(f"the ring at {path} was closed before it answered")
        return None
    if answer[0][:1] == REFUSED:
        raise rebuilt(answer[0])
    (message_bytes,) = WELCOME.unpack(answer[0])
    return int(message_bytes)


def _no_answer(path: Path, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the ring at {path} gave no answer within {deadline_s:g} s")
