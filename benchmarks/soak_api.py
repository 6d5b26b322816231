"""Long runs of the trajectory API that `make test` has no time for.

    .venv/bin/python -m benchmarks.soak_api                          about half an hour on two cores
    .venv/bin/python -m benchmarks.soak_api --only kills --kills 10

load: ten times as many groups as the trainer takes, for five minutes. kills: `kill -9` of server, trainer and producers
at random moments, also in the middle of a write to the journal or to a slot of shared memory, then on a full disk.
roles: `kill -9` of `atropos serve`, `train` and `env`, against what the environment and a curriculum wrote down.
Each part writes benchmarks/results/soak_api_PART.json with the commit; ends with 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.e2e.api_faults import KINDS, full_disk, killed
from tests.e2e.overload import missed, overload
from tests.e2e.role_kills import KINDS as ROLES
from tests.e2e.role_kills import killed_roles

DISK_MB = 48
PROMISES = {
    "load": "ten times too many groups cost neither memory nor groups nor anyone's share",
    "roles": "every draw is trained exactly once, and nothing that no environment ran",
    "kills": "every acknowledged group is in the commit log exactly once, and none is torn",
}


def load(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    found = overload(folder, wanted.seconds)
    rss = found.rss_bytes
    kept = {**asdict(found), "rss_bytes": {"least": min(rss), "most": max(rss), "first": rss[0], "last": rss[-1]}}
    return kept | {"missed": missed(found)}


def kills(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    kinds = [KINDS[number % len(KINDS)] for number in range(wanted.kills)]
    random.shuffle(kinds)
    found = killed(folder / "kills", kinds, tell=console.say)
    made = {**asdict(found), "kills": dict(Counter(kinds)), "missed": found.missed()}
    made["recoveries_s"] = {
        "median": statistics.median(found.recoveries_s or [0.0]),
        "most": max(found.recoveries_s, default=0.0),
    }
    return made | {"full_disk": (disk := on_a_full_disk(folder)), "missed": made["missed"] + disk["missed"]}


def on_a_full_disk(folder: Path) -> dict[str, Any]:
    where = folder / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True).returncode:
        return {"missed": ["this user may not mount a small tmpfs, so a full disk could not be made"]}
    try:
        found = full_disk(folder / "full", where)
    finally:
        subprocess.run(["umount", str(where)], check=True)
    return {**asdict(found), "missed": found.missed()}


def roles(folder: Path, wanted: argparse.Namespace) -> dict[str, Any]:
    kinds = [ROLES[number % len(ROLES)] for number in range(wanted.kills)]
    random.shuffle(kinds)
    found = killed_roles(folder / "roles", kinds, tell=console.say)
    return {**asdict(found), "missed": found.missed()}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {"load": load, "kills": kills, "roles": roles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--seconds", type=float, default=300.0, help="of load, once the hub is full")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the moments of the kills")
    wanted = parser.parse_args()
    random.seed(wanted.seed)
    os.environ["HF_HUB_OFFLINE"] = "1"
    RESULTS.mkdir(exist_ok=True)
    rows, all_hold = [], True
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        for name, part in PARTS.items():
            if wanted.only not in (None, name):
                continue
            machine, since = described(), time.monotonic()
            (Path(scratch) / name).mkdir()
            try:
                found = part(Path(scratch) / name, wanted)
            except AssertionError as error:  # someone did not get on
                found = {"missed": [str(error)[:4000]]}
            promised = not found["missed"]
            result = {
                "machine": machine,
                "seed": wanted.seed,
                "took_s": time.monotonic() - since,
                PROMISES[name]: promised,
            }
            (RESULTS / f"soak_api_{name}.json").write_text(json.dumps(result | {name: found}, indent=1) + "\n")
            rows += [(name, key, str(value)) for key, value in found.items()]
            rows.append((name, "holds", "yes" if promised else "NO"))
            all_hold &= promised
    console.table(("part", "", ""), rows)
    raise SystemExit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
