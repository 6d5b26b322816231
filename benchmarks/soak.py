"""Long runs that `make test` has no time for.

    seeds       five random seeds of the default run
    kills       each role killed ten times, at a random step
    resume      twenty random moments and both sides of an epoch's end: the same bits, every draw settled once
    schedules   ten thousand runs in virtual time, and hubs, with random delays, failures and crashes
    overlap     five seeds on-policy and with max_staleness 1: the speed, and the accuracy at the end
    readme      the README's own environment, by the command that stands beside it: its default seed, and four random ones
    tools       the same of the environment with tools that docs/multi-turn.md builds

    make soak                      about two hours on two cores
    python -m benchmarks.soak --only kills,seeds --kills 2 --seeds 1

Writes benchmarks/results/soak.json, and soak_PART.json for the last five, with the commit that it ran on; ends with 1
where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks import soak_resume
from benchmarks.machine import RESULTS, described
from benchmarks.memory import pss
from tests.e2e.runs import QUICK, RunningRun, finish, weights
from tests.pages.blocks import the_block
from tests.shared_memory import SharedFiles

STEPS = 9  # of QUICK
ROLES = ("engine", "trainer", "supervisor")
MEMORY_BYTES = 4e9
RUN_S = 180


def learns(seed: int, folder: Path) -> dict[str, Any]:
    """The default run under one seed: how much it gains, and what the bridge did at every step."""
    started = time.monotonic()
    run = RunningRun(folder, "run", "--bridge", "ipc", "--env", "gsm8k", "--seed", str(seed), "--dir", str(folder))
    highest = 0
    while run.process.poll() is None and time.monotonic() - started < 3 * RUN_S:
        children = run.supervisor.children(recursive=True) if run.process.poll() is None else []
        highest = max(highest, sum(pss(one) for one in [run.supervisor, *children]))
        time.sleep(0.25)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = lines[0]["eval/accuracy"], lines[-1]["eval/accuracy"]
    publish = sorted(line["bridge/publish_s"] for line in lines[1:])
    return {
        "seed": seed,
        "exit": run.process.wait(30),
        "seconds": time.monotonic() - started,
        "pss_bytes": highest,
        "before": before,
        "after": after,
        "gain_points": 100 * (after - before),
        "problems": lines[-1]["eval/problems"],
        "max_abs_logprob_diff": max(line["alignment/max_abs_logprob_diff"] for line in lines),
        "probe_shift_nats": max(line["policy/probe_shift_nats"] for line in lines),
        "publish_s_median": statistics.median(publish),
        "publish_s_max": publish[-1],
        "bytes_copied": sum(line["bridge/bytes_copied"] for line in lines),
    }


def survives(role: str, reference: bytes, folder: Path) -> dict[str, Any]:
    """Kill `role` at a random moment between the first step and the last; resume; compare the weights."""
    files = SharedFiles()
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK)
    step = random.randrange(1, STEPS - 1)
    run.wait_for_step(step)
    time.sleep(random.uniform(0, 0.3))
    if run.process.poll() is not None:
        return {"role": role, "step": step, "held": True, "note": "the run was faster than the kill"}
    files.look()
    killed = time.monotonic()
    run.kill(role)
    code = run.ended_within(10)
    seconds = time.monotonic() - killed
    named = role == "supervisor" or f"ProcessDied {role}" in run.text
    left = files.left()
    finish(folder, "resume", str(folder))
    same = weights(folder, STEPS) == reference
    return {"role": role, "step": step, "exit": code, "ended_in_s": seconds, "named": named, "left": sorted(left),
            "same_bits": same, "held": named and not left and same}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10, help="of each role")
    parser.add_argument("--moments", type=int, default=20, help="of part resume, beside the ends of epochs")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas")
    wanted = parser.parse_args()
    only = wanted.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"there is no part {sorted(unknown)[0]!r}: {', '.join(PARTS)}")
    holds_up = [part(wanted) for name, part in PARTS.items() if name in only and name not in ("seeds", "kills")]
    if {"seeds", "kills"} & set(only):
        wanted.seeds, wanted.kills = wanted.seeds * ("seeds" in only), wanted.kills * ("kills" in only)
        holds_up.append(learning_and_kills(wanted))
    raise SystemExit(0 if all(holds_up) else 1)


def learning_and_kills(wanted: argparse.Namespace) -> bool:
    result: dict[str, Any] = {"machine": described(), "seeds": [], "kills": []}
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        folder = Path(scratch)
        for number in range(wanted.seeds):
            result["seeds"].append(learns(secrets.randbelow(2**31), folder / f"seed-{number}"))
            console.say(f"seed {number + 1}/{wanted.seeds}: {result['seeds'][-1]}")
        reference = b""
        if wanted.kills:
            finish(folder / "whole", "run", "--dir", str(folder / "whole"), *QUICK)
            reference = weights(folder / "whole", STEPS)
        for number in range(wanted.kills):
            for role in ROLES:
                result["kills"].append(survives(role, reference, folder / f"kill-{number}-{role}"))
                console.say(f"kill {number + 1}/{wanted.kills}: {result['kills'][-1]}")
    gains = [entry["gain_points"] for entry in result["seeds"]]
    result["holds"] = {
        "every run ends with 0": all(entry["exit"] == 0 for entry in result["seeds"]),
        "median gain >= 20 points": not gains or statistics.median(gains) >= 20,
        "each gain >= 12 points": all(gain >= 12 for gain in gains),
        f"each run within {RUN_S} s": all(entry["seconds"] <= RUN_S for entry in result["seeds"]),
        "each run within 4 GB": all(entry["pss_bytes"] <= MEMORY_BYTES for entry in result["seeds"]),
        "alignment <= 1e-4 at every step": all(entry["max_abs_logprob_diff"] <= 1e-4 for entry in result["seeds"]),
        "the policy moves by more than 0.5 nats": all(entry["probe_shift_nats"] > 0.5 for entry in result["seeds"]),
        "every publish under 0.1 s": all(entry["publish_s_max"] < 0.1 for entry in result["seeds"]),
        "every kill ends cleanly and resumes to the same bits": all(entry["held"] for entry in result["kills"]),
    }
    return written("soak", result)


def resume(wanted: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        result = {"machine": described(), **soak_resume.resumes(wanted.moments, Path(scratch))}
    killed = sum(one["killed"] for one in result["kills"])
    result["holds"] = {
        "every resume ends with the same bits, each draw settled once": all(one["held"] for one in result["kills"]),
        "four of five moments hit a living run": killed >= 0.8 * len(result["kills"]),
    }
    return written("soak_resume", result)


def schedules(wanted: argparse.Namespace) -> bool:
    first = secrets.randbelow(2**31)
    result = {"machine": described(), **soak_resume.schedules(wanted.schedules, first)}
    happened = result["happened"]
    result["holds"] = {
        "no schedule failed": not result["failed"],
        "fewer than 1 % gave up": happened["gave_up"] < max(0.01 * wanted.schedules, 1.0),
        "runs died, were stopped, grew stale": all(happened[what] for what in ("ProcessDied", "Interrupted", "stale")),
    }
    return written("soak_schedules", result)


def overlap(wanted: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        result = {"machine": described(), **soak_resume.overlaps(wanted.seeds, Path(scratch))}
    points = soak_resume.SAME_POINTS
    result["holds"] = {
        f"the same accuracy within {points:g} points": abs(result["difference_points"]) <= points,
        "trajectories/s at least 1.3 times": result["ratio"] >= 1.3,
    }
    return written("soak_overlap", result)


def readme(wanted: argparse.Namespace) -> bool:
    [command] = [line for line in the_block("README.md", "atropos check ./sums.py").commands if " run " in line]
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        (Path(scratch) / "sums.py").write_text(the_block("README.md", "import random").text)
        result = of_seeds(command.replace("./sums.py", f"{scratch}/sums.py"), wanted.seeds, Path(scratch))
    result["holds"] = {"each gain >= 15 points": all(one["gain_points"] >= 15 for one in result["seeds"])}
    return written("soak_readme", result)


def tools(wanted: argparse.Namespace) -> bool:
    [command] = the_block("docs/multi-turn.md", "atropos run --env calculator").commands
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        result = of_seeds(command, wanted.seeds, Path(scratch))
    result["holds"] = {"each gain >= 20 points": all(one["gain_points"] >= 20 for one in result["seeds"])}
    return written("soak_tools", result)


def of_seeds(command: str, seeds: int, scratch: Path) -> dict[str, Any]:
    """What `command`, an `atropos run`, gains with seed 0, which is the default, and with random ones, so many in all, and how its
    tools fared in the first step and the last."""
    result: dict[str, Any] = {"machine": described(), "seeds": []}
    for number in range(seeds):
        seed, folder = secrets.randbelow(2**31) if number else 0, scratch / f"seed-{number}"
        started = time.monotonic()
        finish(folder, *command.split()[1:], "--seed", str(seed), "--dir", str(folder), deadline_s=1500)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        before, after = lines[0]["eval/accuracy"], lines[-1]["eval/accuracy"]
        said = {name: [lines[1][name], lines[-1][name]] for name in lines[1] if name.startswith("tools/")}
        result["seeds"].append({"seed": seed, "before": before, "after": after, "steps": lines[-1]["step"],
                                "gain_points": 100 * (after - before), "seconds": time.monotonic() - started, **said})  # fmt: skip
        console.say(f"seed {number + 1}/{seeds}: {result['seeds'][-1]}")
    return result


def written(name: str, result: dict[str, Any]) -> bool:
    console.table(("", "holds"), [(claim, "yes" if holds_up else "NO") for claim, holds_up in result["holds"].items()])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return all(result["holds"].values())


PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "seeds": learning_and_kills,
    "kills": learning_and_kills,
    "resume": resume,
    "schedules": schedules,
    "overlap": overlap,
    "readme": readme,
    "tools": tools,
}


if __name__ == "__main__":
    main()
