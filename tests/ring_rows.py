"""Trajectories through an exchange whose producers are killed, for a test with few of them and a soak with many.

What a trajectory holds follows from its group's seed and its place in it, so that each field of each can be compared bit
by bit wherever it arrives.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.rings import RingGroups
from atropos_adapter_skyrl.row_messages import RowPosition, packed
from atropos_adapter_skyrl.rows import TrainingRow
from atropos_adapter_skyrl.source import GroupRequest, GroupResult
from atropos_adapter_skyrl.work_client import WorkClient
from atropos_core.errors import ProcessDied
from atropos_core.types import Draw

N = 8  # of a group
CONCURRENCY = 16
AT_ONCE = 64  # groups that are requested
PARAMS = {"max_tokens": 64}
_IDS = np.random.Generator(np.random.Philox(key=1)).integers(0, 1 << 30, 1 << 14).astype(np.int32)
_FLOATS = -np.abs(np.random.Generator(np.random.Philox(key=2)).normal(size=1 << 14)).astype(np.float32)
_FLAGS = _FLOATS > -0.7


def row_of(seed: int, member: int, longest: int = 128) -> TrainingRow:
    """`longest` tokens at most, of the prompt and of the reply."""
    at = (seed * 31 + member * 977) % (len(_IDS) - 2 * longest)
    prompt, size = 1 + (seed + member) % longest, 1 + (seed * 7 + member) % longest
    end = at + size
    return TrainingRow(
        _IDS[at : at + prompt], _IDS[at + 1 : end + 1], _FLAGS[at:end],
        None if seed % 5 == 0 else _FLOATS[at:end], _IDS[at:end] % 3, float(_FLOATS[at]),
        "length" if seed % 3 else "stop", True, _FLOATS[at + 1 : end + 1] if seed % 7 == 0 else None,
        {"member": member / 3} if seed % 11 == 0 else {},
    )  # fmt: skip


def equal(one: TrainingRow, other: TrainingRow) -> bool:
    """Every field, bit by bit, with its type."""
    if (one.reward, one.finish, one.last, dict(one.metrics)) != (
        other.reward,
        other.finish,
        other.last,
        dict(other.metrics),
    ):
        return False
    for name in ("prompt", "response", "trained", "logprobs", "versions", "advantages"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or a.tobytes() != b.tobytes()):
            return False
    return True


def produce(folder: str, longest: int) -> None:
    """A worker without an engine: as fast as requests come, until none come any more."""
    try:
        client = WorkClient.connect(Path(folder), CONCURRENCY, slots=1024, slot_bytes=1 << 14)
        while not client.ended:
            for job in client.take(1.0):
                requested = json.loads(job.payload)
                rows = [
                    (row_of(requested["draw"][4], member, longest), RowPosition(member, 0))
                    for member in range(requested["n"])
                ]
                for part in (rows[:2:-1], rows[2::-1]):  # not in the order in which they are wanted
                    client.send(job, [packed(part)])
                client.done(job)
        client.close()
    except ProcessDied:
        pass


@dataclass
class Seen:
    groups: int = 0
    trajectories: int = 0
    wrong: int = 0
    kills: int = 0
    noticed_s: list[float] = field(default_factory=list)
    requeued: int = 0
    seconds: float = 0.0


class Producers:
    """So many processes of `produce`; one that is killed is replaced."""

    def __init__(self, folder: Path, count: int, longest: int = 128) -> None:
        self._arguments = (str(folder), longest)
        self._context = multiprocessing.get_context("spawn")
        self.processes = [self._start() for _ in range(count)]

    def _start(self) -> Any:
        process = self._context.Process(target=produce, args=self._arguments, daemon=True)
        process.start()
        return process

    def kill_one(self) -> int:
        """Its process id."""
        victim = self.processes.pop(0)
        pid = int(victim.pid)
        os.kill(pid, signal.SIGKILL)
        self.processes.append(self._start())
        return pid

    def end(self) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def producers(folder: Path, count: int, longest: int = 128) -> Iterator[Producers]:
    made = Producers(folder, count, longest)
    try:
        yield made
    finally:
        made.end()


async def run(folder: Path, trajectories: int, kills: int, *, seed: int = 0, workers: int = 2) -> Seen:
    """Ask for so many, check each, and kill as many producers at random moments between."""
    source = RingGroups(SkyRLOptions(source="rings", rings=folder, deadline_s=120.0, attempts=1, max_staleness=2))
    await source.open()
    await source.set_version(2)  # rows are of versions 0 to 2
    seen, groups = Seen(), trajectories // N
    chance = random.Random(seed)
    kill_at = sorted(chance.sample(range(groups // 20, groups - groups // 20), kills))
    numbers = iter(range(groups))
    with producers(folder, workers) as made:
        await _until(lambda: source.exchange.workers == workers)
        began = time.monotonic()

        async def ask_on() -> None:
            for number in numbers:
                requested = GroupRequest(Draw(number, "none", "train", 0, seed=number), N, True)
                [arrived] = await source.fetch([requested], PARAMS, step_wise=False)
                seen.groups += 1
                seen.trajectories += len(arrived.trajectories)
                seen.wrong += not _whole(arrived, number)
                if kill_at and number >= kill_at[0]:
                    kill_at.pop(0)
                    await _kill(made, source, seen)

        await asyncio.gather(*(ask_on() for _ in range(AT_ONCE)))
        seen.seconds = time.monotonic() - began
        seen.requeued = source.exchange.requeued
        assert source.exchange.stashed_bytes == 0
        await source.close()
    return seen


async def _kill(made: Producers, source: RingGroups, seen: Seen) -> None:
    """One that has begun something: it is stopped wherever it is, and its slots fill, since more is requested than there are."""
    workers = source.exchange.workers
    os.kill(made.processes[0].pid, signal.SIGSTOP)
    await asyncio.sleep(0.01)
    made.kill_one()
    killed = time.monotonic()
    seen.kills += 1
    await _until(lambda: source.exchange.workers < workers)
    seen.noticed_s.append(time.monotonic() - killed)


async def _until(what: Any) -> None:
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        await asyncio.sleep(0.001)


def _whole(arrived: GroupResult, seed: int) -> bool:
    return len(arrived.trajectories) == N and all(
        len(rows) == 1 and equal(rows[0], row_of(seed, member)) for member, rows in enumerate(arrived.trajectories)
    )
