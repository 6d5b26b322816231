"""Attackers of every kind against a real `atropos serve`, and a good client beside them.

    .venv/bin/python -m benchmarks.soak_api_hostile                      about twenty minutes
    .venv/bin/python -m benchmarks.soak_api_hostile --only "header bytes" --seconds 5

Eight attackers of one kind at a time, beside a server of its own, each in a process that uses at most a twentieth of a core. The
bar: the good client's p95 stays under 50 ms and none of its calls fails, the server's memory grows by at most 64 MB and comes back.
Whether it does is seen in two rounds of the same attack on the same server. After the first, 32 MB may be left 5 s later: what is
loaded and made at the first call, and arenas of Python's allocator, which go back only when nothing in them lives, and are used
again. After the second, at most 8 MB more than after the first: what is kept once is no leak, what is kept each time is one. The
server has its defaults but for bounds on bodies that the bar's 64 MB follow from; bodies of 40 MB, which are refused by those, are
sent to one with the defaults as well, whose bound is another. Writes benchmarks/results/soak_api_hostile.json after each kind, each
with its commit; ends with 1 where the bar did not hold.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.e2e.attacked import Attacked, attacked, call_for
from tests.e2e.attacks import KINDS, SHARE
from tests.served import atropos_serve, serving

P95_MS, GROWTH_BYTES, KEPT_BYTES, KEPT_AGAIN_BYTES = 50.0, 64e6, 32e6, 8e6
ATTACKERS = 8
BOUNDED = ("--body-mb", "8", "--in-flight-mb", "64")
DEFAULTS = "defaults, plain JSON of 40 MB"
RESULT = RESULTS / "soak_api_hostile.json"


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--only", action="append", choices=[*KINDS, DEFAULTS], help="the figures of others are kept")
    given.add_argument("--seconds", type=float, default=20.0)
    wanted = given.parse_args()
    machine = {**described(), "server": " ".join(BOUNDED), "share_of_a_core": SHARE}
    here = {name: machine.pop(name) for name in ("commit", "load_at_start")} | {"seconds": wanted.seconds}
    measured = kept_of(machine)
    missed: list[str] = []
    for kind in wanted.only or [*KINDS, DEFAULTS]:
        measured[kind] = measured_beside(kind, wanted.seconds) | here
        console.say(f"{kind}: {json.dumps(measured[kind])}")
        missed = write(machine, measured)
    for line in missed:
        console.warn(line)
    raise SystemExit(bool(missed))


def write(machine: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """What missed the bar."""
    missed = [f"{kind}: {one}" for kind, found in measured.items() for one in found["missed"]]
    kept = {
        "what": "eight attackers of each kind, and a good client", **machine,
        "kinds": {kind: measured[kind] for kind in KINDS if kind in measured},
        DEFAULTS: measured.get(DEFAULTS),
        "missed": missed,
    }  # fmt: skip
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return missed


def kept_of(machine: dict[str, Any]) -> dict[str, Any]:
    """What was measured before on such a machine; each kind has its commit."""
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if any(before.get(name) != value for name, value in machine.items()):
        return {}
    return {**before["kinds"], **({DEFAULTS: before[DEFAULTS]} if before[DEFAULTS] else {})}


def measured_beside(kind: str, seconds: float) -> dict[str, Any]:
    """Of a server of its own, whose memory no other kind has made room in."""
    bounds = () if kind == DEFAULTS else BOUNDED
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with serving(atropos_serve("--dir", f"{folder}/api", *bounds), output) as server:
            alone = Attacked()
            call_for(server.port, min(seconds, 2.0), alone)
            attack = "plain JSON of 40 MB" if kind == DEFAULTS else kind
            found, again = (attacked(server, attack, ATTACKERS, seconds) for _ in range(2))
            refused = {name: n for name, n in server.metrics().items() if name.startswith("atropos_refused")}
        printed = output.read_text()
    missed = wrong_with(found, again, bounded=kind != DEFAULTS) + ["a traceback"] * ("Traceback" in printed)
    lines, p95_ms = len(printed.splitlines()), round(alone.quantile_ms(0.95), 2)
    kept_mb = round((again.rss_bytes[2] - found.rss_bytes[2]) / 1e6, 1)
    return figures(found) | {
        "kept_again_mb": kept_mb,
        "alone_p95_ms": p95_ms,
        "lines_of_log": lines,
        "refused": refused,
        "missed": missed,
    }


def figures(found: Attacked) -> dict[str, Any]:
    before, most, after = found.rss_bytes
    return {
        "attacks": found.attacks, "calls": len(found.seconds), "failures": len(found.failures),
        "p50_ms": round(found.quantile_ms(0.5), 2), "p95_ms": round(found.quantile_ms(0.95), 2),
        "most_ms": round(found.quantile_ms(1.0), 2), "grown_mb": round((most - before) / 1e6, 1),
        "cpu_s": round(found.cpu_s, 2), "kept_mb": round((after - before) / 1e6, 1),
    }  # fmt: skip


def wrong_with(found: Attacked, again: Attacked, *, bounded: bool) -> list[str]:
    before, most, after = found.rss_bytes
    wrong = []
    if (p95 := found.quantile_ms(0.95)) > P95_MS:
        wrong.append(f"p95 {p95:.1f} ms")
    if failures := found.failures + again.failures:
        wrong.append(f"{len(failures)} calls failed, the first: {failures[0]}")
    if bounded and most - before > GROWTH_BYTES:
        wrong.append(f"memory grew by {(most - before) / 1e6:.0f} MB")
    if bounded and after - before > KEPT_BYTES:
        wrong.append(f"{(after - before) / 1e6:.0f} MB were kept")
    if bounded and (kept := again.rss_bytes[2] - after) > KEPT_AGAIN_BYTES:
        wrong.append(f"{kept / 1e6:.0f} MB more were kept after a second attack")
    return wrong


if __name__ == "__main__":
    main()
