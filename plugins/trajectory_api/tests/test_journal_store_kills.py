"""`kill -9` at any moment, also in the middle of a write: every acknowledged group is there exactly once, none torn."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Limits
from atropos_trajectory_api.journal.store import JournalStore
from tests.unit import putting

KILLS = int(os.environ.get("ATROPOS_KILLS", "6"))


def test_what_was_acknowledged_survives_a_kill_at_any_moment_exactly_once(tmp_path):
    generator = random.Random()
    seed = generator.randrange(10**6)
    print(f"seed {seed}")  # of a failure
    generator.seed(seed)
    directory = tmp_path / "journal"
    put: dict[int, int] = {}  # id -> key, of all that was ever acknowledged
    committed: set[int] = set()
    for life in range(KILLS):
        for line in _lived(directory, life, generator.uniform(0.0, 0.4)):
            kind, number, *key = line.split()
            if kind == "put":
                assert int(number) not in put, "an id is given once"
                put[int(number)] = int(key[0])
            else:
                committed.add(int(number))
        store = JournalStore(directory, sync="never", segment_bytes=3_000_000)
        hub: Hub[bytes] = Hub(Limits(40_000_000), max_staleness=None, on_dropped=lambda *_: None, store=store)
        there = {number for number, _ in hub.labels()}
        assert not there & committed, "what is inside a checkpoint is not served again"
        lost = set(put) - there - committed
        assert all(hub.knows(str(key)) for key in put.values())
        _check_unsaid_commits(lost, there, committed)
        session = hub.open("reader")
        entries = session.try_lease(BatchSize(groups=len(there)), 0) if there else []
        assert entries is not None
        for entry in entries:
            key = int(entry.payload.split(b":")[0])
            assert entry.payload == putting.content(key), "none is torn"
            assert put.setdefault(entry.id, key) == key  # the last one may have been written and not been heard of
        committed |= lost
        session.close()
        store.close()
    assert len(put) > KILLS


def _check_unsaid_commits(lost: set[int], there: set[int], committed: set[int]) -> None:
    """At most one batch is settled on the disk without anyone having heard of it: the one under way at the kill."""
    assert len(lost) <= 3
    assert not lost & there


def _lived(directory: Path, life: int, seconds: float) -> list[str]:
    """The output of one process before it was killed; a line without its end does not count."""
    process = subprocess.Popen(
        [sys.executable, putting.__file__, str(directory), str(life + 1)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    said = os.read(pipe, 65536)  # it is up
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:  # read on, or it would spend its life waiting for a full pipe
        if select.select([pipe], [], [], left)[0]:
            said += os.read(pipe, 65536)
    process.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err.decode()
    said += out
    return said[: said.rfind(b"\n")].decode().splitlines()
