"""The hub's journal beside sqlite3: the same groups put, leased, trained and committed, and read again after a restart.

    python -m benchmarks.store

What either promises a group that was acknowledged: `never`/`off` outlive `kill -9`, `second`/`normal` a power cut but for
the last moments, `always`/`full` a power cut. The two take turns. Writes benchmarks/results/store.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import cast

from atropos_core import console
from atropos_core.hub.records import Label
from atropos_trajectory_api.journal.log import Sync
from atropos_trajectory_api.journal.store import JournalStore
from benchmarks.machine import RESULTS, described

BATCH = 8
SIZES = {"8 kB": (8_224, 8000), "98 kB": (98_368, 2000)}  # bytes of a group, how many
SYNCED = 400  # where each waits for the disk
PROMISES = {"kill": ("never", "off"), "second": ("second", "normal"), "power": ("always", "full")}
TABLE = (
    "create table if not exists groups(id integer primary key, key blob unique, environment text, sequences int, "
    "size int, version int, draw int, task text, state int, payload blob)"
)
Figures = dict[str, float]


def journal(directory: Path, sync: str, size: int, groups: int) -> Figures:
    payload, label = os.urandom(size), Label("words", 8, size, 0, 1, "t1")

    def opened() -> JournalStore:
        return JournalStore(directory / "journal", sync=cast(Sync, sync))

    async def put(store: JournalStore) -> None:
        for number in range(groups):
            store.put(number, payload, label, number.to_bytes(16, "little"))
            await store.written()

    async def drain(store: JournalStore) -> None:
        for first in range(0, groups, BATCH):
            ids = range(first, first + BATCH)
            store.mark(ids, "leased")
            assert all(len(store.read(number)) == size for number in ids)
            store.mark(ids, "trained")
            store.settle(ids, committed=True)
            await store.written()

    store, started = opened(), perf_counter()
    asyncio.run(put(store))
    put_s = perf_counter() - started
    store.close()
    started = perf_counter()
    store = opened()
    assert len(store.restored(0.0).held) == groups
    recover_s, started = perf_counter() - started, perf_counter()
    asyncio.run(drain(store))
    drain_s = perf_counter() - started
    store.close()
    return {"puts_per_s": groups / put_s, "drained_per_s": groups / drain_s, "recover_s": recover_s}


def database(directory: Path, sync: str, size: int, groups: int) -> Figures:
    payload = os.urandom(size)

    def opened() -> sqlite3.Connection:
        found = sqlite3.connect(directory / "groups.db", isolation_level=None)
        found.execute("pragma journal_mode=wal")
        found.execute(f"pragma synchronous={sync}")
        found.execute(TABLE)
        return found

    store, started = opened(), perf_counter()
    for number in range(groups):
        row = (number, number.to_bytes(16, "little"), "words", 8, size, 0, 1, "t1", 0, payload)
        store.execute("insert into groups values(?,?,?,?,?,?,?,?,?,?)", row)
    put_s = perf_counter() - started
    store.close()
    started = perf_counter()
    store = opened()
    labels = "select id, key, environment, sequences, size, version, draw, task, state from groups order by id"
    assert len(store.execute(labels).fetchall()) == groups
    recover_s, started = perf_counter() - started, perf_counter()
    marks = ",".join("?" * BATCH)
    for first in range(0, groups, BATCH):
        ids = tuple(range(first, first + BATCH))
        store.execute(f"update groups set state=1 where id in ({marks})", ids)
        assert len(store.execute(f"select payload from groups where id in ({marks})", ids).fetchall()) == BATCH
        store.execute(f"update groups set state=2 where id in ({marks})", ids)
        store.execute(f"delete from groups where id in ({marks})", ids)
    drain_s = perf_counter() - started
    store.close()
    return {"puts_per_s": groups / put_s, "drained_per_s": groups / drain_s, "recover_s": recover_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats, machine, rows = parser.parse_args().repeats, described(), []
    stores: dict[str, Callable[[Path, str, int, int], Figures]] = {"journal": journal, "sqlite3": database}
    for name, (size, most) in SIZES.items():
        for promise, syncs in PROMISES.items():
            groups = SYNCED if promise == "power" else most
            found: dict[str, list[Figures]] = {kind: [] for kind in stores}
            for _ in range(repeats):
                for sync, (kind, store) in zip(syncs, stores.items(), strict=True):
                    with tempfile.TemporaryDirectory() as folder:
                        found[kind].append(store(Path(folder), sync, size, groups))
            for kind, figures in found.items():
                middle = {key: statistics.median(figure[key] for figure in figures) for key in figures[0]}
                rows.append({"group": name, "groups": groups, "outlives": promise, "store": kind, **middle})
    shown = [
        (r["group"], r["outlives"], r["store"], *(f"{r[k]:,.0f}" for k in ("puts_per_s", "drained_per_s")),
         f"{1e3 * r['recover_s']:,.0f} ms for {r['groups']:,}")
        for r in rows
    ]  # fmt: skip
    console.table(("group", "outlives", "", "puts/s", "drained/s", "recovered in"), shown)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "store.json").write_text(
        json.dumps({"machine": machine, "repeats": repeats, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
