"""The working end of an exchange (`atropos_core.exchange`): takes what is asked, sends what it makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_core.codec import Buffer
from atropos_core.errors import DeadlineExceeded, ProcessDied
from atropos_core.exchange import DONE, FAILED, META, NONCE, PIECE, SOCKET
from atropos_core.liveness import DEFAULT_PATIENCE, Patience
from atropos_core.ring import SLOT_BYTES, SLOTS, RingProducer
from atropos_core.ring_consumer import Lease, RingConsumer
from atropos_core.ring_listener import RingListener
from atropos_core.silence import stopped_too_long

DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 3600.0  # whoever asks may be held up for as long as a training step takes


@dataclass(eq=False)
class Job:
    """Something that was asked."""

    payload: bytes
    lease: Lease
    id: int
    pieces: int = 0  # that were sent


class Hands:
    """One worker, with so many jobs at a time. Blocking: `take`, `send`, `done`, `failed`. On an event loop: `jobs`, `put`,
    and `finish` or `give_up`."""

    def __init__(self, up: RingProducer, down: RingConsumer, folder: Path, patience: Patience) -> None:
        self._up = up
        self._down = down
        self._folder = folder
        self._patience = patience

    @classmethod
    def connect(
        cls,
        folder: Path,
        hands: int,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> Hands:
        """`slots` of `slot_bytes` for pieces; a larger piece travels apart. Raises ProcessDied where nobody asks there."""
        folder = folder.resolve()
        try:
            nonce = (folder / NONCE).read_text()
        except OSError as error:
            raise ProcessDied(f"nobody asks for work at {folder}: {error.strerror}.") from None
        own = folder / f"worker-{os.getpid()}-{secrets.token_hex(4)}"
        listener = RingListener(own / SOCKET, nonce)
        try:
            said = json.dumps({"socket": str(own / SOCKET), "hands": hands})
            up = RingProducer.connect(folder / SOCKET, nonce, slots=slots, slot_bytes=slot_bytes, name=said)
            down = listener.accept(DEADLINE_S)
            if down is None:
                up.close()
                raise DeadlineExceeded(f"{folder} gave no work within {DEADLINE_S:g} s")
            return cls(up, down, own, patience)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        finally:
            listener.close()

    @property
    def ended(self) -> bool:
        """Nothing more will be asked."""
        return self._down.ended

    def take(self, deadline_s: float) -> list[Job]:
        """What was asked, waiting for the first; none where none came in time, or nothing ever will."""
        return [_job(lease) for lease in self._down.take(deadline_s)]

    def send(self, job: Job, buffers: Sequence[Buffer], *, now: bool = False) -> None:
        """One piece of the answer, in a message that goes with the next `done` at the latest, or `now`."""
        job.pieces += 1
        self._up.send(buffers, meta=META.pack(job.id, PIECE), deadline_s=ANSWER_DEADLINE_S)
        if now:
            self._up.ring()

    def done(self, job: Job) -> None:
        """The answer is whole. Another job may come."""
        self._up.send([job.pieces.to_bytes(8, "little")], meta=META.pack(job.id, DONE), deadline_s=ANSWER_DEADLINE_S)
        self._up.ring()
        job.lease.release()
        self._down.send_answers(now=True)

    def failed(self, job: Job, cause: str) -> None:
        self._up.send([cause.encode()], meta=META.pack(job.id, FAILED), deadline_s=ANSWER_DEADLINE_S)
        self._up.ring()
        job.lease.release()
        self._down.send_answers(now=True)

    async def jobs(self) -> AsyncIterator[Job]:
        """What is asked, until whoever asks has gone. Raises ProcessSilent where that is stopped for too long, with answers
        of this worker unread."""
        stopped = asyncio.ensure_future(
            stopped_too_long("whoever asks for work", self._down.pid, self._patience, lambda: self._up.unanswered > 0)
        )
        stopped.add_done_callback(lambda task: None if task.cancelled() else self.close())
        try:
            async for leases in self._down.arrivals():
                for lease in leases:
                    yield _job(lease)
            if stopped.done():
                raise stopped.result()
        finally:
            stopped.cancel()

    async def put(self, job: Job, buffers: Sequence[Buffer]) -> None:
        """One piece of the answer. Raises DeadlineExceeded, ProcessDied."""
        job.pieces += 1
        await self._up.put(buffers, meta=META.pack(job.id, PIECE), deadline_s=ANSWER_DEADLINE_S)

    async def finish(self, job: Job) -> None:
        await self._up.put(
            [job.pieces.to_bytes(8, "little")], meta=META.pack(job.id, DONE), deadline_s=ANSWER_DEADLINE_S
        )
        job.lease.release()

    async def give_up(self, job: Job, cause: str) -> None:
        await self._up.put([cause.encode()], meta=META.pack(job.id, FAILED), deadline_s=ANSWER_DEADLINE_S)
        job.lease.release()

    def close(self) -> None:
        """Hang up: what was begun goes to another worker. May be called twice."""
        self._up.close()
        self._down.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _job(lease: Lease) -> Job:
    number, _ = META.unpack(lease.meta)
    return Job(bytes(lease.payload), lease, number)
