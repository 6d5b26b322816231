"""The soak's parts of asynchrony and exact resume: random kill points, both sides of an epoch's end, schedules in virtual
time, and what overlap does to what is learned. `python -m benchmarks.soak --only resume,schedules,overlap` runs them."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.overlap import measured, trained
from tests.e2e.ledger import check_epochs, plant_ledger, settled
from tests.e2e.runs import RunningRun, finish, weights
from tests.shared_memory import SharedFiles
from tests.unit import hub_schedules
from tests.unit import schedules as run_schedules

STEPS, TASKS = 12, 10  # an epoch ends in the middle of a step, and with one
ROLES = ("engine", "trainer", "supervisor")
SMALL = (
    "--env", "gsm8k", "--deterministic", "--steps", str(STEPS),
    "--set", f"environment.gsm8k.problems={TASKS}", "--set", "curriculum.use=ledger",
    "--set", "training.groups_per_step=5", "--set", "training.group_size=4",
    "--set", "evaluation.problems=8", "--set", "evaluation.every=4",
)  # fmt: skip
PROBLEMS = 2000  # an accuracy of so many has a standard error of one point
SAME_POINTS = 2.0


def resumes(kills: int, folder: Path) -> dict[str, Any]:
    """Random moments between the first step and the last until `kills` of them met a living run, and the four around two ends
    of an epoch: a run that is killed there and resumed ends with the bits of one that was not, and every draw is settled
    once. A run that had ended before its moment says that nothing is left to do."""
    os.environ["PYTHONPATH"] = f"{plant_ledger(folder)}:{os.environ.get('PYTHONPATH', '')}"
    every = ("--set", "checkpoint.every=1")
    whole = folder / "whole"
    run = RunningRun(whole, "run", "--dir", str(whole), *SMALL, *every)
    run.wait_for_step(1)
    began = time.monotonic()
    if run.process.wait(300) != 0:
        raise SystemExit(run.text)
    lasts_s = time.monotonic() - began
    reference, ledger = weights(whole, STEPS), settled(whole, STEPS)
    check_epochs(ledger, TASKS)
    found: list[dict[str, Any]] = []
    met = number = 0
    while met < kills:
        after_s, saved_every = random.uniform(0, lasts_s), random.choice((1, 2, 5))
        one = _killed(folder / f"random-{number}", 1, after_s, random.choice(ROLES), saved_every, reference, ledger)
        found.append({"where": "random", **one})
        number += 1
        met += one["killed"]
        console.say(f"kill {met}/{kills}: {found[-1]}")
    for step in (1, 2, 3, 4):  # 2 and 4 end an epoch: killed at once when the step before, or that step, is recorded
        one = _killed(folder / f"epoch-{step}", step, 0.0, "supervisor", 1, reference, ledger)
        found.append({"where": "epoch's end", **one})
        console.say(f"after step {step}: {found[-1]}")
    return {"lasts_s": lasts_s, "outcomes": Counter(outcome for _, _, outcome in ledger), "kills": found}


def _killed(
    folder: Path, step: int, after_s: float, role: str, saved_every: int, reference: bytes, ledger: list[list[Any]]
) -> dict[str, Any]:
    files = SharedFiles()
    run = RunningRun(folder, "run", "--dir", str(folder), *SMALL, "--set", f"checkpoint.every={saved_every}")
    run.wait_for_step(step)
    time.sleep(after_s)
    entry: dict[str, Any] = {"step": step, "after_s": after_s, "role": role, "saved_every": saved_every}
    alive = run.process.poll() is None
    if alive:
        files.look()
        run.kill(role)
        run.ended_within(10)
    left = files.left()
    again = finish(folder, "resume", str(folder))
    same = weights(folder, STEPS) == reference
    once = settled(folder, STEPS) == ledger
    quiet = alive or "nothing left to do" in again.text
    lines = (folder / "metrics.jsonl").read_bytes().count(b"\n") == STEPS + 1
    return entry | {
        "killed": alive,
        "left": sorted(left),
        "same_bits": same,
        "same_ledger": once,
        "one_line_a_step": lines,
        "held": same and once and quiet and lines and not left,
    }


def schedules(number: int, first: int) -> dict[str, Any]:
    """So many runs of the real loop, and of a hub whose processes die, in virtual time; one process a core."""
    happened, failed = Counter[str](), []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for seed, (ended, error) in enumerate(pool.imap(_one_seed, range(first, first + number), chunksize=20), first):
            happened += ended
            if error:
                failed.append({"seed": seed, "error": error})
                console.warn(f"schedule {seed}: {error}")
            if (seed + 1 - first) % 1000 == 0:
                console.say(f"schedules {seed + 1 - first}/{number}: {dict(happened)}")
    return {"first": first, "number": number, "happened": happened, "failed": failed}


def _one_seed(seed: int) -> tuple[Counter[str], str]:
    try:
        return run_schedules.run_schedule(seed) + hub_schedules.run_schedule(seed), ""
    except Exception as error:  # noqa: BLE001 - of every kind: each is a finding
        return Counter(), f"{type(error).__name__}: {error}"


def overlaps(seeds: int, folder: Path, steps: int = 100) -> dict[str, Any]:
    """The default run with a far-away grader, on-policy and overlapped, each seed with both."""
    alone = measured(0.0, 0, 15)
    latency = (alone["rollouts_s"] + alone["update_s"]) / 2
    pairs: list[dict[str, Any]] = []
    for number in range(seeds):
        seed, pair = random.randrange(2**31), {}
        for staleness in (0, 1):
            place = folder / f"overlap-{number}-{staleness}"
            place.mkdir()
            chosen = ("--seed", str(seed), "--set", f"evaluation.problems={PROBLEMS}")
            pair[staleness] = trained(place, latency, staleness, steps, *chosen)
        pairs.append({"seed": seed, "on_policy": pair[0], "overlapped": pair[1]})
        console.say(f"overlap {number + 1}/{seeds}: " + ", ".join(
            f"{one['trajectories_per_s']:.0f}/s to {100 * one['accuracy']:.1f} %" for one in pair.values()))  # fmt: skip
    accuracy = {
        name: 100 * statistics.mean(pair[name]["accuracy"] for pair in pairs) for name in ("on_policy", "overlapped")
    }
    return {
        "generation_s": alone["rollouts_s"],
        "update_s": alone["update_s"],
        "latency_s": latency,
        "problems": PROBLEMS,
        "pairs": pairs,
        "accuracy_percent": accuracy,
        "difference_points": accuracy["overlapped"] - accuracy["on_policy"],
        "ratio": statistics.median(
            pair["overlapped"]["trajectories_per_s"] / pair["on_policy"]["trajectories_per_s"] for pair in pairs
        ),
    }
