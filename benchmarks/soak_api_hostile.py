"""Attackers of every kind against a real `atropos serve`, and a good client beside them.

    .venv/bin/python -m benchmarks.soak_api_hostile                      about eight minutes
    .venv/bin/python -m benchmarks.soak_api_hostile --only "header bytes" --seconds 5

Eight attackers of one kind at a time, each in a process that uses at most a twentieth of a core. The bar: the good client's p95
stays under 50 ms and none of its calls fails, the server's memory grows by at most 64 MB and comes back (to within 16 MB in 5 s).
The server has its defaults but for bounds on bodies that the bar's 64 MB follow from; bodies of 40 MB, which are refused by those,
are sent to one with the defaults as well, whose bound is another. Writes benchmarks/results/soak_api_hostile.json with the commit;
ends with 1 where the bar did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.e2e.attacked import Attacked, attacked, call_for
from tests.e2e.attacks import KINDS, SHARE
from tests.served import atropos_serve, serving

P95_MS, GROWTH_BYTES, KEPT_BYTES = 50.0, 64e6, 16e6
ATTACKERS = 8
BOUNDED = ("--body-mb", "8", "--in-flight-mb", "64")


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--only", action="append", choices=KINDS)
    given.add_argument("--seconds", type=float, default=20.0)
    wanted = given.parse_args()
    kinds: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        with serving(atropos_serve("--dir", f"{folder}/api", *BOUNDED), Path(folder, "output")) as server:
            nice = psutil.Process(server.process.pid).nice()
            alone = Attacked()
            call_for(server.port, min(wanted.seconds, 5.0), alone)
            for kind in wanted.only or KINDS:
                found = attacked(server, kind, ATTACKERS, wanted.seconds)
                kinds[kind] = figures(found) | {"missed": (wrong := wrong_with(found))}
                missed += [f"{kind}: {one}" for one in wrong]
                console.say(f"{kind}: {json.dumps(kinds[kind])}")
            refused = {name: n for name, n in server.metrics().items() if name.startswith("atropos_refused")}
        output = Path(folder, "output").read_text()
        if "Traceback" in output:
            missed.append("the server wrote a traceback")
        lines = len(output.splitlines())
        with serving(atropos_serve("--dir", f"{folder}/defaults"), Path(folder, "output")) as server:
            by_default = figures(attacked(server, "plain JSON of 40 MB", ATTACKERS, wanted.seconds))
    kept = {
        "what": "eight attackers of each kind, and a good client",
        **described(),
        "seconds": wanted.seconds, "load_average": os.getloadavg(), "share_of_a_core": SHARE, "nice": nice, "server": " ".join(BOUNDED),
        "alone": figures(alone),
        "kinds": kinds, "defaults, plain JSON of 40 MB": by_default, "lines_of_log": lines, "refused": refused, "missed": missed,
    }  # fmt: skip
    (RESULTS / "soak_api_hostile.json").write_text(json.dumps(kept, indent=1) + "\n")
    for line in missed:
        console.warn(line)
    raise SystemExit(bool(missed))


def figures(found: Attacked) -> dict[str, Any]:
    before, most, after = found.rss_bytes
    return {
        "attacks": found.attacks, "calls": len(found.seconds), "failures": len(found.failures),
        "p50_ms": round(found.quantile_ms(0.5), 2), "p95_ms": round(found.quantile_ms(0.95), 2),
        "most_ms": round(found.quantile_ms(1.0), 2), "grown_mb": round((most - before) / 1e6, 1),
        "cpu_s": round(found.cpu_s, 2), "kept_mb": round((after - before) / 1e6, 1),
    }  # fmt: skip


def wrong_with(found: Attacked) -> list[str]:
    before, most, after = found.rss_bytes
    wrong = []
    if (p95 := found.quantile_ms(0.95)) > P95_MS:
        wrong.append(f"p95 {p95:.1f} ms")
    if found.failures:
        wrong.append(f"{len(found.failures)} calls failed, the first: {found.failures[0]}")
    if most - before > GROWTH_BYTES:
        wrong.append(f"memory grew by {(most - before) / 1e6:.0f} MB")
    if after - before > KEPT_BYTES:
        wrong.append(f"{(after - before) / 1e6:.0f} MB were kept")
    return wrong


if __name__ == "__main__":
    main()
