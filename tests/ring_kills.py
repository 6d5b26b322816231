"""Rings whose producer, or consumer, is killed at random moments; for a test with few kills, and a soak with many.

Messages are numbered, and every eight bytes of one are its number: a slot that was half written over shows both numbers.
Most are so large that a process is killed while it copies one into its slot.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_core.errors import ProcessDied
from atropos_trajectory_client.shm.consumer import SlotLease
from atropos_trajectory_client.shm.listener import RingListener
from atropos_trajectory_client.shm.producer import Ack, RingProducer
from tests.shared_memory import SharedFiles

SLOTS, SLOT_BYTES = 16, 1 << 18
NONCE = "kills"
ALIVE_S = 0.06  # at most, before a kill
DEADLINE_S = 30.0
_STORED = struct.Struct("<QQ")  # how many messages the consumer has, and its complaint


@dataclass
class Kills:
    """What was seen. `noticed_s`: from each kill until the other end knew, and had read what was left."""

    messages: int = 0
    noticed_s: list[float] = field(default_factory=list)
    descriptors: int = 0  # more at the end than at the beginning
    mappings: int = 0
    files: int = 0  # in /dev/shm, of these processes


def content(number: int) -> bytes:
    size = (number * 7919) % SLOT_BYTES if number % 40 else SLOT_BYTES + 8  # one in forty travels apart
    return number.to_bytes(8, "little") * (size // 8 + 1)


def is_whole(lease: SlotLease, number: int) -> bool:
    return lease.key == str(number) and lease.payload == content(number)


def produce(path: Path, number: int) -> None:
    """Send without end."""
    ring = RingProducer.connect(path, NONCE, slots=SLOTS, slot_bytes=SLOT_BYTES)
    while True:
        ring.send([content(number)], key=str(number))
        if number % 3:
            ring.ring()
        number += 1


def kill_producers(folder: Path, kills: int, seed: int) -> Kills:
    """Each producer goes on where the one before was last heard of: all messages come, each once."""
    seen, chance, before, files = Kills(), random.Random(seed), _kept(), SharedFiles()
    listener = RingListener(folder / "producers" / "ring.sock", NONCE)
    for _ in range(kills):
        child = _fork(produce, listener.path, seen.messages)
        ring = listener.accept(DEADLINE_S)
        assert ring is not None
        kill_at, killed_at = time.monotonic() + chance.uniform(0.0, ALIVE_S), 0.0
        kept: list[tuple[int, SlotLease]] = []
        until = time.monotonic() + DEADLINE_S
        while not ring.ended:
            assert time.monotonic() < until, "the end of a producer was not seen"
            if not killed_at and time.monotonic() > kill_at:
                files.look()
                os.kill(child.pid, signal.SIGKILL)
                killed_at = time.monotonic()
            for lease in ring.take(0.001 if not killed_at else 1.0):
                assert is_whole(lease, seen.messages), f"message {seen.messages} came torn, late or twice"
                if chance.random() < 0.1 and len(kept) < SLOTS - 2:
                    kept.append((seen.messages, lease))
                else:
                    lease.release()
                seen.messages += 1
        seen.noticed_s.append(time.monotonic() - killed_at)
        for number, lease in kept:
            assert is_whole(lease, number), f"message {number} was written over while it was leased"
            lease.release()
        kept.clear()
        ring.close()
        _end(child)
    listener.close()
    del lease
    return _compared(seen, before, files)


def consume(path: Path, stored: mmap.mmap) -> None:
    """Take without end. A message counts as stored before it is answered, and only once."""
    listener = RingListener(path, NONCE)
    ring = listener.accept(DEADLINE_S)
    assert ring is not None
    count, _ = _STORED.unpack_from(stored)
    while True:
        for lease in ring.take(DEADLINE_S):
            number = int(lease.key)
            if number > count or not is_whole(lease, number):
                _STORED.pack_into(stored, 0, count, number + 1)
            elif number == count:
                count += 1
                _STORED.pack_into(stored, 0, count, 0)
            lease.release(number)


def kill_consumers(folder: Path, kills: int, seed: int) -> Kills:
    """The producer sends again whatever was not answered, under the same key: all are stored, each once."""
    seen, chance, before, files = Kills(), random.Random(seed), _kept(), SharedFiles()
    stored = mmap.mmap(-1, _STORED.size)
    path = folder / "consumers" / "ring.sock"
    for _ in range(kills):
        child = _fork(consume, path, stored)
        ring = _connected(path)

        def answered(ack: Ack) -> None:
            assert ack.error is None and ack.value == seen.messages
            seen.messages += 1

        ring.on_ack = answered
        kill_at, killed_at = time.monotonic() + chance.uniform(0.0, ALIVE_S), 0.0
        number = seen.messages
        try:
            while True:
                if not killed_at and time.monotonic() > kill_at:
                    files.look()
                    os.kill(child.pid, signal.SIGKILL)
                    killed_at = time.monotonic()
                ring.send([content(number)], key=str(number), deadline_s=DEADLINE_S)
                number += 1
                if chance.random() < 0.5:
                    ring.ring()
        except ProcessDied:
            seen.noticed_s.append(time.monotonic() - killed_at)
        _end(child)
        count, complaint = _STORED.unpack_from(stored)
        assert not complaint, f"message {complaint - 1} came torn, or before its turn"
        assert seen.messages <= count, "a message was answered that is not stored"
        ring.close()
    stored.close()
    path.unlink()
    return _compared(seen, before, files)


def _connected(path: Path) -> RingProducer:
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return RingProducer.connect(path, NONCE, slots=SLOTS, slot_bytes=SLOT_BYTES)
        except (ProcessDied, FileNotFoundError):
            assert time.monotonic() < until, "no consumer listens"
            time.sleep(0.002)


def _fork(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _end(process: Any) -> None:
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL, f"it ended by itself, with {process.exitcode}"
    process.close()


def _kept() -> tuple[int, int]:
    mappings = Path("/proc/self/maps").read_text().count("memfd:atropos-ring")
    return len(os.listdir("/proc/self/fd")), mappings


def _compared(seen: Kills, before: tuple[int, int], files: SharedFiles) -> Kills:
    seen.descriptors, seen.mappings = (now - then for now, then in zip(_kept(), before, strict=True))
    seen.files = len(files.left())
    return seen
