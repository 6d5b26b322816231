"""A real producer and trainer on one journal in one process, made to be killed: `python putting.py DIRECTORY SEED`.

Says `put N KEY` once group N is acknowledged and `committed N` once it is settled, each before it goes on.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Label, Limits
from atropos_trajectory_api.journal.store import JournalStore


def content(key: int) -> bytes:
    """What a group must hold, by its key: torn or mixed bytes would show."""
    generator = random.Random(key)
    return b"%d:" % key + generator.randbytes(generator.choice([0, 10, 3_000, 60_000, 2_000_000]))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(directory: Path, seed: int) -> None:
    store = JournalStore(directory, sync="never", segment_bytes=3_000_000)
    hub: Hub[bytes] = Hub(Limits(40_000_000), max_staleness=None, on_dropped=lambda *_: None, store=store)
    session = hub.open("trainer")
    generator = random.Random(seed)
    key = seed * 1_000_000
    while True:
        if generator.random() < 0.6:
            payload = content(key)
            number = hub.try_put(payload, Label("words", 1, len(payload)), key=str(key))
            if number is not None:
                say("put", number, key)
                key += 1
        elif (entries := session.try_lease(BatchSize(groups=generator.choice([1, 3])), 0)) is not None:
            kept = [entry.id for entry in entries]
            if generator.random() < 0.2:
                session.give_back(kept)
                continue
            session.trained(kept)
            session.commit(kept)
            for number in kept:
                say("committed", number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
