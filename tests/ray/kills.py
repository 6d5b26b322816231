"""A run with workers on a simulated cluster, of which something is killed again and again, and what three accounts that know nothing of
each other say afterwards: the curriculum's, the records of the steps, and what the workers themselves have written down."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from atropos_core.config.run_file import to_toml
from atropos_records.rollout_records import RolloutRecords
from tests.e2e.ledger import plant_ledger, settled
from tests.e2e.runs import RunningRun
from tests.shared_memory import SharedFiles

KINDS = ("worker node", "engine node", "trainer node", "driver")
NODES = {"worker node": "workers", "engine node": "first", "trainer node": "second"}
CPUS = {"workers": "4", "first": "1", "second": "1"}
MARK = "ATROPOS_TEST_RUN"  # in the environment of all that a run starts
GROUPS, STALENESS, SIZE = 2, 1, 4
DEADLINE_S = 240.0


def on_roles(address: str) -> dict[str, Any]:
    """Of `[launcher]`: everything on a machine of its own."""
    roles = {
        "engine": {"cpus": 1, "other": {"first": 1}},
        "trainer": {"cpus": 1, "other": {"second": 1}},
        "server": {"cpus": 0, "other": {"head": 0.1}},
    }
    return {"use": "ray", "address": address, "roles": roles}


def write_run(folder: Path, launcher: Mapping[str, Any], *, wait: float | str, **more: Any) -> Path:
    """A run file of the environment `waiting`."""
    (folder / "wait").write_text(str(wait))
    files = {"wait": str(folder / "wait"), "ledger": str(folder / "ledger")}
    table: dict[str, Any] = {
        "model": "tiny", "restarts": 1000, "api": {"url": "http://127.0.0.1:0"}, "bridge": {"use": "checkpoint"},
        "sampling": {"max_tokens": 8}, "evaluation": {"problems": 0}, "checkpoint": {"every": 2},
        "training": {"steps": 100_000, "groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": STALENESS},
        "transform": {"drop_flat": {"use": "none"}},  # flat groups are trained, and recorded, as any other
        "curriculum": {"use": "ledger"}, "sink": {"console": {}, "jsonl": {"rollouts_every": 1}},
        "trainer": {"threads": 1}, "engine": {"threads": 1},
        "environment": {"waiting": {"use": "tests.ray.waiting:Waiting", "problems": 20_000, **files}},
        "launcher": launcher, **more,
    }  # fmt: skip
    (folder / "run.toml").write_text(to_toml(table))
    return folder / "run.toml"


class Killed:
    """The run, through all that befalls it."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder = folder
        self.directory = folder / "run"
        os.environ["PYTHONPATH"] = f"{plant_ledger(folder)}:{os.environ.get('PYTHONPATH', '')}"
        os.environ[MARK] = str(self.directory)
        self.run = RunningRun(self.directory, "run", str(file), "--dir", str(self.directory))

    def resume(self) -> None:
        self.run = RunningRun(self.directory, "resume", str(self.directory))

    @property
    def steps(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def until(self, what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not holds():
            assert self.run.process.poll() is None, f"the run ended:\n{self.run.text}"
            assert time.monotonic() < end, f"no {what} within {deadline_s} s:\n{self.run.text}"
            time.sleep(0.05)

    def stop(self) -> None:
        self.run.process.send_signal(signal.SIGINT)
        try:
            assert self.run.process.wait(DEADLINE_S) == 130, self.run.text
        finally:
            self.end()

    def end(self) -> None:
        self.run.process.kill()
        self.run.process.wait()


def kill_at_random(killed: Killed, cluster: Any, kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """Each kind in turn, in an order that chance gives, at a moment that it gives. Fails where the run does not come further after one,
    by itself or resumed once it has ended by name."""
    found: list[dict[str, Any]] = []
    kinds = [kind for _ in range(-(-kills // len(KINDS))) for kind in chance.sample(KINDS, len(KINDS))]
    for kind in kinds[:kills]:
        killed.until("step", lambda: killed.steps > 1)
        time.sleep(chance.uniform(0, 3))
        before, read, began = killed.steps, len(killed.run.text), time.monotonic()
        if kind == "driver":
            killed.end()
            killed.resume()
            outcome = "resumed"
        else:
            node = NODES[kind]
            cluster.say(f"remove {node}")
            cluster.say(f"add {node} {CPUS[node]}")
            outcome = "went on"
        end = time.monotonic() + DEADLINE_S
        while killed.steps <= before + 1:
            if killed.run.process.poll() is not None:
                said = killed.run.text[read:]
                assert re.search(r"^(ProcessDied|ProcessSilent|FitError|DeadlineExceeded) ", said, re.MULTILINE), (
                    f"no name for its end:\n{said}"
                )
                assert "Traceback" not in said, said
                killed.resume()
                read, outcome = len(killed.run.text), "ended by name, resumed"
            assert time.monotonic() < end, f"no step within {DEADLINE_S} s of the kill of {kind}:\n{killed.run.text}"
            time.sleep(0.05)
        if outcome == "went on" and "starting again from the last checkpoint" in killed.run.text[read:]:
            outcome = "started again"
        found.append({"kind": kind, "outcome": outcome, "step": before, "seconds": round(time.monotonic() - began, 1)})
    return found


def accounts(folder: Path) -> dict[str, int]:
    """Raises AssertionError where a draw was settled twice or never, or a group was trained in two steps, or without having been run."""
    checkpoints = sorted((folder / "run/checkpoints").glob("step-*"))
    entries = settled(folder / "run", int(checkpoints[-1].name.removeprefix("step-")))
    twice = {draw: n for draw, n in Counter(draw for draw, _, _ in entries).items() if n > 1}
    assert not twice, f"settled more than once: {twice}"
    newest, in_progress = max(draw for draw, _, _ in entries), GROUPS * (STALENESS + 2)
    missing = set(range(newest)) - {draw for draw, _, _ in entries}
    assert len(missing) <= in_progress, f"drawn, and never settled: {sorted(missing)}"
    assert all(draw > newest - 3 * in_progress for draw in missing), f"drawn, and never settled: {sorted(missing)}"
    records = RolloutRecords(folder / "run")
    steps_of: dict[str, set[int]] = {}
    members: Counter[str] = Counter()
    for step in map(records.step, records.steps()):
        for episode in step.episodes:
            if episode.outcome == "trained" and not episode.failed:
                steps_of.setdefault(episode.task, set()).add(step.step)
                members[episode.task] += 1
    assert all(len(steps) == 1 for steps in steps_of.values()), "a task, which is drawn once, was trained in two steps"
    assert all(count <= SIZE for count in members.values()), "a group was trained twice"
    by_curriculum = sum(outcome == "trained" for _, _, outcome in entries)
    assert len(steps_of) >= by_curriculum, (
        f"{by_curriculum} were settled as trained, and {len(steps_of)} are recorded as that"
    )
    runs: dict[str, set[int]] = {}
    for line in (folder / "ledger").read_text().splitlines():
        _, task, seed = json.loads(line)
        runs.setdefault(task, set()).add(seed)
    not_run = [task for task, count in members.items() if len(runs.get(task, ())) < count]
    assert not not_run, f"trained, and no worker has run so many of them: {not_run}"
    return {"draws_settled": len(entries), "groups_trained": len(steps_of), "draws_in_progress": len(missing)}


def processes(directory: Path) -> dict[str, psutil.Process]:
    """Of a run, by role."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or [""]
        if any(program in line for program in ("atropos_core.processes.child_main", "atropos_launcher_ray.command")):
            try:
                if process.environ().get(MARK) == str(directory):
                    found[line[-1]] = process
            except psutil.Error:
                continue
    return found


def nothing_is_left(killed: Killed, files: SharedFiles, within_s: float = 60.0) -> None:
    """No process, no port, no file beside the run directory; the server's token is gone from there."""
    until = time.monotonic() + within_s
    while left := processes(killed.directory):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.1)
    for host, port in set(
        re.findall(rb"listening on http://([\d.]+):(\d+)", (killed.directory / "logs/server.log").read_bytes())
    ):
        with socket.socket() as probe:
            assert probe.connect_ex((host.decode(), int(port))) != 0, f"port {port.decode()} is still open"
    assert not files.left(), files.left()
    assert not (killed.directory / "api/token").exists()
