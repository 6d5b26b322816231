"""The worker's end of the work queue (`atropos_adapter_skyrl.work_queue`): takes jobs, sends their results."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atropos_adapter_skyrl.stopped_process import stopped_too_long
from atropos_adapter_skyrl.work_queue import DONE, FAILED, META, NONCE, PIECE, SOCKET
from atropos_core.codec import Buffer
from atropos_core.errors import DeadlineExceeded, ProcessDied
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_trajectory_client.shm.consumer import RingConsumer, SlotLease
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import SLOT_BYTES, SLOTS, RingProducer

DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 3600.0  # the requester may be blocked for as long as a training step takes


@dataclass(eq=False)
class Job:
    """One request."""

    payload: bytes
    lease: SlotLease
    id: int
    pieces: int = 0  # sent so far


class WorkClient:
    """One worker, with up to `concurrency` jobs at a time.

    Blocking: `take`, `send`, `done`, `failed`. On an event loop: `jobs`, `put`, and `finish` or `give_up`."""

    def __init__(self, up: RingProducer, down: RingConsumer, folder: Path, patience: Patience) -> None:
        self._up = up
        self._down = down
        self._folder = folder
        self._patience = patience

    @classmethod
    def connect(
        cls,
        folder: Path,
        concurrency: int,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> WorkClient:
        """Connect with `slots` slots of `slot_bytes` for pieces; a larger piece is sent separately.

        Raises ProcessDied if no process offers work in `folder`."""
        with _own_folder(folder) as (own, nonce, listener):
            greeting = _introduction(own, concurrency)
            up = RingProducer.connect(folder / SOCKET, nonce, slots=slots, slot_bytes=slot_bytes, name=greeting)
            try:
                return cls(up, _given(listener.accept(DEADLINE_S), folder), own, patience)
            except BaseException:
                up.close()
                raise

    @classmethod
    async def open(cls, folder: Path, concurrency: int, *, patience: Patience = DEFAULT_PATIENCE) -> WorkClient:
        """Do the same as `connect` without blocking the event loop. If it is cancelled, nothing stays open."""
        with _own_folder(folder) as (own, nonce, listener):
            up = await RingProducer.open(folder / SOCKET, nonce, name=_introduction(own, concurrency))
            try:
                return cls(up, _given(await listener.next(DEADLINE_S), folder), own, patience)
            except BaseException:
                up.close()
                raise

    @property
    def ended(self) -> bool:
        """True if no more jobs will come."""
        return self._down.ended

    def take(self, deadline_s: float) -> list[Job]:
        """Wait for the first job, and return all that are there. The list is empty if none came in time, or none will come."""
        return [_job(lease) for lease in self._down.take(deadline_s)]

    def send(self, job: Job, buffers: Sequence[Buffer], *, now: bool = False) -> None:
        """Send one piece of the answer: with the next `done` at the latest, or at once with `now`."""
        job.pieces += 1
        self._up.send(buffers, meta=META.pack(job.id, PIECE), deadline_s=ANSWER_DEADLINE_S)
        if now:
            self._up.ring()

    def done(self, job: Job) -> None:
        """Complete the answer. The worker can then get another job."""
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
        """Yield jobs until the requester is gone.

        Raises ProcessSilent if the requester is stopped for too long with answers of this worker unread."""
        stopped = asyncio.ensure_future(
            stopped_too_long(
                "the process that offers work", self._down.pid, self._patience, lambda: self._up.unanswered > 0
            )
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
        """Send one piece of the answer. Raises DeadlineExceeded, ProcessDied."""
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
        """Disconnect. Jobs that were begun go to another worker. May be called twice."""
        self._up.close()
        self._down.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _own_folder(folder: Path) -> Iterator[tuple[Path, str, RingListener]]:
    """Yield the worker's own folder, the requester's nonce, and a listener that the requester connects to.

    The worker's folder is removed if the body raises."""
    folder = folder.resolve()
    try:
        nonce = (folder / NONCE).read_text()
    except OSError as error:
        raise ProcessDied(f"no SkyRL trainer offers work at {folder}: {error.strerror}.") from None
    own = folder / f"worker-{os.getpid()}-{secrets.token_hex(4)}"
    listener = RingListener(own / SOCKET, nonce)
    try:
        yield own, nonce, listener
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    finally:
        listener.close()


def _introduction(own: Path, concurrency: int) -> str:
    return json.dumps({"socket": str(own / SOCKET), "concurrency": concurrency})


def _given(down: RingConsumer | None, folder: Path) -> RingConsumer:
    if down is None:
        raise DeadlineExceeded(f"{folder.resolve()} gave no work within {DEADLINE_S:g} s")
    return down


def _job(lease: SlotLease) -> Job:
    number, _ = META.unpack(lease.meta)
    return Job(bytes(lease.payload), lease, number)
