"""`atropos serve` beside atroposlib's own `run-api`, in one run, with the same bytes.

    make .venv-atroposlib/stamp
    python -m benchmarks.api

Each server is a process of its own, started empty for each measurement; the three take turns, so that what else the
machine does falls on all of them. The client shares the cores with the server: it sends bytes made beforehand over
kept-alive blocking sockets, and the table says what it costs. Writes benchmarks/results/api.json with the commit that it
ran on; ends with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.api_native import drain_native, ingest_native, opened
from benchmarks.api_servers import BATCH, OFF, ON, UPSTREAM, open_old, started
from benchmarks.machine import RESULTS, described
from tests.old_payloads import body, old_group
from tests.raw_http import Answer, Connection, keep_in_flight, request
from tests.served import JSON, Server

GROUP, BATCH_GROUPS = 8, 8
CONNECTIONS = 4
DISTINCT = 32  # bodies; sent over and over
LONG, SHORT = 1024, 64
STATUS_CALLS = 50
Figures = dict[str, float]


def posts(length: int, zipped: bool) -> list[bytes]:
    """Requests as BaseEnv makes them (gzip level 9), or the same without compression."""
    extra = {"content_encoding": "gzip"} if zipped else {}
    return [
        request("POST", "/scored_data", body(old_group(GROUP, length, seed), zipped), **JSON, **extra)
        for seed in range(DISTINCT)
    ]


class Stopwatch:
    """Wall time, and what client and server took of the processor meanwhile."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.wall, self.client, self.cpu = time.perf_counter(), time.process_time(), server.cpu_s()

    def per_group(self, groups: int) -> Figures:
        return {
            "groups_per_s": groups / (time.perf_counter() - self.wall),
            "client_ms": 1e3 * (time.process_time() - self.client) / groups,
            "server_ms": 1e3 * (self.server.cpu_s() - self.cpu) / groups,
        }


def accepted(answer: Answer) -> None:
    assert answer.status == 200, answer.body


def ingest_and_drain(server: Server, length: int, zipped: bool, groups: int) -> dict[str, Figures]:
    """A quarter of the groups warms the server up; the rest is timed, and its memory counted. Then all is drained."""
    open_old(server, GROUP * BATCH_GROUPS, GROUP)
    requests, warm = posts(length, zipped), groups // 4
    keep_in_flight(server.port, requests, warm, CONNECTIONS, accepted)
    before, watch = server.rss(), Stopwatch(server)
    keep_in_flight(server.port, requests, groups - warm, CONNECTIONS, accepted)
    ingest = watch.per_group(groups - warm)
    ingest["memory_mb"] = (server.rss() - before) / 1e6 / (groups - warm)

    get = request("GET", "/batch", accept_encoding="gzip") if zipped else BATCH
    end, answers = Connection(server.port), []
    watch = Stopwatch(server)
    while (answer := end.call(get)).status == 200 and len(answer.body) > 1000:
        answers.append(answer)
    drain = watch.per_group(groups)
    end.close()
    drained = [json.loads(gzip.decompress(a.body) if zipped else a.body)["batch"] for a in answers]
    assert sum(len(batch) for batch in drained) == groups, "not every group came out again"
    assert all(len(sequence) == length for batch in drained for group in batch for sequence in group["tokens"])
    return {"ingest": ingest, "drain": drain}


def queue(server: Server, lengths: list[int]) -> dict[str, Figures]:
    """/status-env while the queue grows, and the first batch out of the longest one."""
    open_old(server, GROUP * BATCH_GROUPS, GROUP)
    requests, queued = posts(SHORT, True), 0
    found: Figures = {}
    status = request("GET", "/status-env", b'{"env_id": 0}', **JSON)
    for length in lengths:
        keep_in_flight(server.port, requests, length - queued, CONNECTIONS, accepted)
        queued = length
        end, seconds = Connection(server.port), []
        for _ in range(STATUS_CALLS):
            started = time.perf_counter()
            assert end.call(status).status == 200
            seconds.append(time.perf_counter() - started)
        end.close()
        found[f"status_env_{length}_ms"] = 1e3 * statistics.median(seconds)
    started = time.perf_counter()
    answer = server.call(BATCH)
    found["first_batch_ms"] = 1e3 * (time.perf_counter() - started)
    assert len(json.loads(answer.body)["batch"]) == BATCH_GROUPS
    return {"queue": found}


def native(server: Server, length: int, groups: int) -> dict[str, Figures]:
    """The same groups as frames: put by a worker, then leased, trained and committed batch after batch."""
    session = opened(server.port, GROUP, BATCH_GROUPS)
    requests = session.puts([old_group(GROUP, length, seed) for seed in range(DISTINCT)], groups)
    watch = Stopwatch(server)
    ingest_native(session, requests)
    ingest = watch.per_group(groups)
    watch = Stopwatch(server)
    assert drain_native(session) == groups
    return {"native_ingest": ingest, "native_drain": watch.per_group(groups)}


def measured(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """{figure: {kind of server: one value a repeat}}"""
    found: dict[str, dict[str, list[float]]] = {}

    def note(kind: str, name: str, figures: Figures) -> None:
        for key, value in figures.items():
            found.setdefault(f"{name}.{key}", {}).setdefault(kind, []).append(value)

    def turn(kinds: tuple[str, ...], work: Callable[[Server], dict[str, Figures]], what: str) -> None:
        for kind in kinds:
            with started(kind, options.upstream) as server:
                for name, figures in work(server).items():
                    note(kind, f"{name}.{what}" if what else name, figures)

    for repeat in range(options.repeats):
        for length, groups in (
            ((SHORT, options.small),) if options.short else ((LONG, options.groups), (SHORT, options.small))
        ):
            for how in ("gzip", "plain"):
                old = partial(ingest_and_drain, length=length, zipped=how == "gzip", groups=groups)
                turn((UPSTREAM, OFF, ON), old, f"8x{length}.{how}")
            if not options.short:
                turn((OFF, ON), partial(native, length=length, groups=4 * groups), f"8x{length}")
        if options.short:
            continue
        kinds = (
            (UPSTREAM, OFF, ON) if repeat == 0 else (OFF, ON)
        )  # upstream takes a minute and more for its first batch
        turn(kinds, partial(queue, lengths=steps(options.queued)), "")
    return found


def steps(queued: int) -> list[int]:
    """Lengths of the queue at which /status-env is timed."""
    return [queued // 40, queued // 5, queued]


def rows(found: dict[str, dict[str, list[float]]], queued: int) -> list[dict[str, Any]]:
    """The best of the repeats (what else runs here can only slow a server), ratios against upstream, what is asked."""
    made = []

    def best(name: str, kind: str) -> float | None:
        values = found.get(name, {}).get(kind)
        return (max if name.endswith("_per_s") else min)(values) if values else None

    def row(
        title: str, name: str, requested: str, holds: Callable[[float, float], bool], *, unit: str, beside: str = ""
    ) -> None:
        upstream = best(beside or name, UPSTREAM) or 0.0
        ours = {kind: best(name, kind) or 0.0 for kind in (OFF, ON)}
        base = name.removesuffix("groups_per_s")
        made.append(
            {
                "measure": title,
                "unit": unit,
                UPSTREAM: upstream,
                **ours,
                "ratios": {kind: value / upstream if upstream else None for kind, value in ours.items()},
                "asked": requested,
                "holds": {kind: holds(value, upstream) for kind, value in ours.items()},
                "client_ms": best(f"{base}client_ms", OFF),
                "server_ms": {kind: best(f"{base}server_ms", kind) for kind in (UPSTREAM, OFF, ON)},
            }
        )

    def times(n: float) -> Callable[[float, float], bool]:
        return lambda ours, upstream: ours >= n * upstream

    for length in (LONG, SHORT):
        for how in ("gzip", "plain"):
            for name, n in (("ingest", 2), ("drain", 5)):
                what = f"JSON {name}, 8 × {length:,}, {how}"
                row(what, f"{name}.8x{length}.{how}.groups_per_s", f"≥ {n}×", times(n), unit="groups/s")
        beside = f"drain.8x{length}.plain.groups_per_s"  # the faster of upstream's two
        row(
            f"native ingest, 8 × {length:,}",
            f"native_ingest.8x{length}.groups_per_s",
            "",
            lambda a, b: True,
            unit="groups/s",
        )
        title = f"native drain, 8 × {length:,} (beside JSON, plain)"
        row(title, f"native_drain.8x{length}.groups_per_s", "≥ 20×", times(20), unit="groups/s", beside=beside)
    row(f"first batch of {queued:,} groups", "queue.first_batch_ms", "< 50 ms", lambda ours, _: ours < 50, unit="ms")
    for length in steps(queued):
        shortest = max(best(f"queue.status_env_{steps(queued)[0]}_ms", kind) or 0.0 for kind in (OFF, ON))

        def flat(ours: float, upstream: float, limit: float = 1.5 * shortest + 0.5) -> bool:
            return ours <= limit

        row(f"/status-env, {length:,} groups", f"queue.status_env_{length}_ms", "flat", flat, unit="ms")
    name = f"ingest.8x{LONG}.plain.memory_mb"
    row("memory per waiting group, 8 × 1,024", name, "≤ 0.1 MB", lambda ours, _: ours <= 0.1, unit="MB")
    return [row for row in made if row[OFF]]


def show(made: list[dict[str, Any]]) -> None:
    def text(value: float | None, end: str = "") -> str:
        return (
            ""
            if not value
            else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4}f}{end}"
        )

    def holds_up(row: dict[str, Any]) -> str:
        return "" if not row["asked"] else "yes" if all(row["holds"].values()) else "NO"

    console.say("atropos serve beside atroposlib's run-api")
    console.table(
        ("", "unit", UPSTREAM, OFF, ON, "×", "×", "asked", "holds"),
        [
            (
                row["measure"], row["unit"], *(text(row[kind]) for kind in (UPSTREAM, OFF, ON)),
                *(text(row["ratios"][kind], "×") for kind in (OFF, ON)), row["asked"], holds_up(row),
            )
            for row in made
        ],
    )  # fmt: skip
    console.say(f"On {os.cpu_count()} cores that client and server share")
    console.table(
        ("processor time, ms a group", UPSTREAM, OFF, ON, "client"),
        [
            (row["measure"], *(text(row["server_ms"][kind]) for kind in (UPSTREAM, OFF, ON)), text(row["client_ms"]))
            for row in made
            if row["client_ms"]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    default = Path(".venv-atroposlib/bin/python")
    parser.add_argument("--upstream", type=Path, default=default, help="a Python that has atroposlib 0.4.0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=400, help="of 8 × 1,024 tokens, a multiple of 8")
    parser.add_argument("--small", type=int, default=2000, help="of 8 × 64 tokens, a multiple of 8")
    parser.add_argument("--short", action="store_true", help="only JSON of 8 × 64 tokens; to api_short.json")
    parser.add_argument("--queued", type=int, default=20_000, help="groups in the queue for the first batch")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out or RESULTS / ("api_short.json" if options.short else "api.json")
    if not options.upstream.exists():
        raise SystemExit(
            f"{options.upstream} is not there: make .venv-atroposlib/stamp, or name another with --upstream"
        )
    machine = described()
    found = measured(options)
    made = rows(found, options.queued)
    show(made)
    sizes = {key: getattr(options, key) for key in ("repeats", "groups", "small", "queued")}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(
        json.dumps({"machine": machine, "sizes": sizes, "rows": made, "values": found}, indent=1) + "\n"
    )
    missed = [row["measure"] for row in made if not all(row["holds"].values())]
    if missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
