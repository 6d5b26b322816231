"""`kill -9` of agents and of the run that they are trained by: nothing stays, no episode is half trained, and what was committed
is taken up exactly. The soak does the same for longer (benchmarks/soak_agents.py)."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.runs import RunningRun, finish, weights

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "plugins/agent_api/atropos_agent_api/examples/calculator.toml"
WATCHED = (
    "--deterministic", "--set", "training.groups_per_step=2", "--set", "training.group_size=4",
    "--set", "checkpoint.every=1", "--set", "evaluation.problems=0",
)  # fmt: skip
ROLES = ("supervisor", "trainer", "engine")
OURS = "atropos_agent_api.sandboxes"  # in the arguments of monitors, and of the functions that are forked off them


def left_by(run: RunningRun) -> list[Path]:
    """Directories of its programs."""
    return list(Path(tempfile.gettempdir()).glob(f"atropos-sandbox-*-{run.process.pid}-*/*"))


def words(process: psutil.Process | None) -> str:
    """Its arguments; none once it has ended."""
    try:
        return " ".join(process.cmdline()) if process is not None else ""
    except psutil.NoSuchProcess:
        return ""


def agents(run: RunningRun) -> list[psutil.Process]:
    """All that the run has started but for engine and trainer, whoever is its parent."""
    return [one for one in run.supervisor.children(recursive=True) if OURS in words(one)]


def functions(run: RunningRun) -> list[psutil.Process]:
    """The agents themselves: forks of monitors, which are forks of the preloader."""
    found = []
    for one in agents(run):
        try:
            parents = one.parents()
        except psutil.NoSuchProcess:
            continue
        if len([parent for parent in parents if OURS in words(parent)]) == 2:
            found.append(one)
    return found


def killed(run: RunningRun, role: str) -> None:
    """While agents run; nothing of it stays."""
    until = time.monotonic() + 60
    while len(below := agents(run)) < 4:
        assert time.monotonic() < until, run.text
        time.sleep(0.005)
    run.kill(role)
    run.ended_within(60)
    _, alive = psutil.wait_procs(below, 60)
    assert not alive, f"still running: {[words(one) for one in alive]}"
    while left := left_by(run):
        assert time.monotonic() < until + 60, left
        time.sleep(0.05)


def killed_and_resumed(folder: Path, kills: int, seed: int) -> None:
    """So many kills of a run, one a step, and its last weights are those of a run that nobody killed."""
    whole, folder, chosen, steps = folder / "whole", folder / "run", random.Random(seed), kills + 2
    finish(whole, "run", str(EXAMPLE), "--dir", str(whole), *WATCHED, "--steps", str(steps), deadline_s=60 + 60 * steps)
    run = RunningRun(folder, "run", str(EXAMPLE), "--dir", str(folder), *WATCHED, "--steps", str(steps))
    for step in range(1, kills + 1):
        run.wait_for_step(step)
        while not set(ROLES[1:]) <= run.children.keys():
            run.wait_for_step(step)
        killed(run, ROLES[step - 1] if step <= len(ROLES) else chosen.choice(ROLES))
        run = RunningRun(folder, "resume", str(folder))
    assert run.process.wait(300) == 0, run.text
    assert weights(folder, steps) == weights(whole, steps)


def agents_killed(folder: Path, kills: int, seed: int) -> int:
    """So many kills of agents while a run trains on, each of which ends its own episode alone. Returns how many there were."""
    folder, chosen, steps = folder / "run", random.Random(seed), max(4, kills)
    run = RunningRun(folder, "run", str(EXAMPLE), "--dir", str(folder), *WATCHED, "--steps", str(steps))
    run.wait_for_step(0)
    killed_agents = 0
    while run.process.poll() is None and killed_agents < kills:
        if found := functions(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen.choice(found).kill()
                killed_agents += 1
        time.sleep(chosen.uniform(0.05, 0.4))
    assert run.process.wait(60 + 60 * steps) == 0, run.text
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == steps
    for line in lines:
        assert line["rollouts/count"] + line["rollouts/failed"] == 8.0
        assert line["agent/trained_tokens"] <= line["agent/sampled_tokens"]
    assert not left_by(run)
    return killed_agents


def test_a_run_of_agents_that_is_killed_resumes_to_the_same_bits(tmp_path):
    killed_and_resumed(tmp_path, 2, seed=2)


def test_agents_that_are_killed_end_their_own_episodes_alone(tmp_path):
    assert agents_killed(tmp_path, 5, seed=0)
