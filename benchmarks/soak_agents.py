"""Agents for hours: they learn, here and in workers, and `kill -9` leaves nothing behind: python -m benchmarks.soak_agents [PART ...]

`learning`: the calculator agent of docs/agents.md from each of five seeds; held-out accuracy gains 20 points or more in all of them.
`workers`: the same agent in two workers of `atropos serve`; the mean reward gains 0.20 or more. `kills`: twenty `kill -9` of supervisor,
trainer or engine while agents run, each resumed, to the bits of a run that nobody killed; then ten of agents, each of which ends its
own episode alone. Each kill comes at a random moment, and nothing may be left behind.

Writes benchmarks/results/soak_agents.json, a part at a time beside what is there of others. On two idle cores some 25, 10 and 15
minutes. Ends with 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from plugins.agent_api.tests.test_example import trained
from tests.e2e.roles import scene
from tests.e2e.test_agent_kills import agents_killed, killed_and_resumed
from tests.e2e.test_agent_roles import learned_by_workers

FILE = RESULTS / "soak_agents.json"
GAIN = 0.20
Part = tuple[dict[str, Any], dict[str, bool]]  # figures, and what of them holds


def learning(wanted: argparse.Namespace) -> Part:
    runs = []
    for seed in range(wanted.seeds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="atropos-soak-") as folder:
            lines = trained(Path(folder), "training.groups_per_step=8", f"training.steps={wanted.steps}", seed=seed)
        before, after = lines[0]["eval/accuracy"], lines[-1]["eval/accuracy"]
        runs.append({"seed": seed, "before": before, "after": after, "seconds": round(time.monotonic() - began)})
        console.say(f"learning, seed {seed}: {before:.1%} -> {after:.1%}")
    worst = min(run["after"] - run["before"] for run in runs)
    claim = f"{len(runs)} seeds of {wanted.steps} steps: {100 * worst:+.1f} points at least, 20 wanted"
    return {"steps": wanted.steps, "runs": runs}, {claim: worst >= GAIN}


def workers(wanted: argparse.Namespace) -> Part:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as folder, scene(Path(folder)) as place:
        first, last = learned_by_workers(place, wanted.steps)
    seconds = round(time.monotonic() - began)
    claim = f"workers of atropos serve: mean reward {first:.3f} -> {last:.3f}, +{GAIN:.2f} wanted"
    return {"steps": wanted.steps, "first": first, "last": last, "seconds": seconds}, {claim: last >= first + GAIN}


def kills(wanted: argparse.Namespace) -> Part:
    """Raises AssertionError, with what was wrong, where something was left or is not the same."""
    seed, of_agents = secrets.randbelow(2**31), wanted.kills // 3
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as folder:
        killed_and_resumed(Path(folder), wanted.kills - of_agents, seed)
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as folder:
        ended = agents_killed(Path(folder), of_agents, seed)
    figures = {
        "seed": seed,
        "of_the_run": wanted.kills - of_agents,
        "of_agents": ended,
        "seconds": round(time.monotonic() - began),
    }
    return figures, {
        f"{figures['of_the_run']} kills of the run, {ended} of agents: nothing left, the same bits": ended == of_agents
    }


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {"learning": learning, "workers": workers, "kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kills", type=int, default=30)
    wanted = parser.parse_args()
    if unknown := set(wanted.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.is_file() else {}
    holds: dict[str, bool] = {}
    for name in wanted.parts or PARTS:
        machine = described()
        figures, held_up = PARTS[name](wanted)
        found[name] = {"machine": machine, **figures, "holds": held_up}
        holds |= held_up
        RESULTS.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    console.table(("", "holds"), [(claim, "yes" if holds_up else "NO") for claim, holds_up in holds.items()])
    raise SystemExit(0 if all(holds.values()) else 1)


if __name__ == "__main__":
    main()
