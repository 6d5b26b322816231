"""A run whose environments' own processes are killed at random, and what its records must say afterwards."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from atropos_core.config.run_file import to_toml
from atropos_records.rollout_records import RolloutRecords
from tests.e2e.runs import RunningRun

DEADLINE_S = 600.0
GROUPS, STALENESS = 6, 2  # of a step; policy versions that a draw may be late by
AFTER = 4  # steps behind the last kill


def until(what: str, holds: Callable[[], bool], run: RunningRun, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert run.process.poll() is None, f"the run ended:\n{run.text}"
        assert time.monotonic() < end, f"no {what} within {deadline_s} s:\n{run.text}"
        time.sleep(0.02)


def steps_of(run: RunningRun) -> int:
    metrics = run.folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def child_of(run: RunningRun, mark: str) -> psutil.Process | None:
    """The one whose command line has `mark`, unless it has just ended."""
    for child in run.supervisor.children(recursive=True):
        try:
            if mark in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def killed_at_random(
    folder: Path,
    environments: Mapping[str, Mapping[str, Any]],
    marks: Mapping[str, str],
    *,
    kills: int,
    seed: int,
    model: str = "toy",
    servers: Mapping[str, Callable[[], None]] | None = None,
) -> dict[str, list[str]]:
    """Kill a process of one environment after another, `kills` times; `marks` are in their command lines. `servers`, by environment: kills
    a server that the run did not start, and starts another in its place. Gives, by environment, why rollouts failed. Fails where the run
    ends, a process does not come back, or a draw is lost or settled twice."""
    servers = servers or {}
    names = [*marks, *servers]
    table = {
        "model": model, **({"engine": {"use": "toy"}, "trainer": {"use": "toy"}, "bridge": {"use": "local"}} if model == "toy" else {}),
        "evaluation": {"problems": 0}, "sampling": {"max_tokens": 4}, "sink": {"jsonl": {"rollouts_every": 1}},
        "training": {"steps": 100_000, "groups_per_step": GROUPS, "group_size": 2, "max_staleness": STALENESS},
        "transform": {"drop_flat": {"use": "none"}},  # flat groups are trained, and recorded, as any other
        "environment": environments,
    }  # fmt: skip
    (folder / "run.toml").write_text(to_toml(table))
    chance = random.Random(seed)
    run = RunningRun(folder / "run", "run", str(folder / "run.toml"), "--dir", str(folder / "run"))
    try:
        until("second step", lambda: steps_of(run) > 1, run)
        for number in range(kills):
            name = names[number % len(names)]
            if name in marks:
                until(f"process of {name}", lambda: child_of(run, marks[name]) is not None, run)  # noqa: B023
            before = steps_of(run)
            time.sleep(chance.uniform(0, 0.4))
            if name in servers:
                servers[name]()
                before = steps_of(run)
            elif (child := child_of(run, marks[name])) is not None:
                child.send_signal(signal.SIGKILL)
            until("step behind a kill", lambda: steps_of(run) > before, run)  # noqa: B023
        before = steps_of(run)
        until("steps behind the last kill", lambda: steps_of(run) >= before + AFTER, run)
        assert all(child_of(run, mark) is not None for mark in marks.values()), "each was started again"
        run.process.send_signal(signal.SIGINT)
        run.process.wait(DEADLINE_S)
    finally:
        run.process.kill()
        run.process.wait()
    return failures(folder / "run", list(environments))


def failures(folder: Path, names: list[str]) -> dict[str, list[str]]:
    """Each draw was settled in one step, but for those in progress as the run was stopped."""
    records = RolloutRecords(folder)
    steps_of_draw: dict[int, set[int]] = {}
    failed: dict[str, list[str]] = {name: [] for name in names}
    for step in map(records.step, records.steps()):
        for episode in step.episodes:
            steps_of_draw.setdefault(episode.draw, set()).add(step.step)
            if episode.failed:
                failed[episode.environment].append(episode.failed)
    assert all(len(steps) == 1 for steps in steps_of_draw.values()), "no draw is settled twice"
    newest, in_progress = max(steps_of_draw), GROUPS * (STALENESS + 2)
    missing = set(range(newest)) - steps_of_draw.keys()
    assert all(draw > newest - 2 * in_progress for draw in missing), f"drawn, and never settled: {sorted(missing)}"
    assert len(missing) <= in_progress, f"{len(missing)} draws are missing"
    return failed
