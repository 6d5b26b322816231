"""Workers on a simulated cluster: their number follows the loop's waits, and kills of anything lose no draw and train none twice."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from atropos_core.storage.atomic import write_whole
from tests.ray.kills import CPUS, Killed, accounts, kill_at_random, nothing_is_left, on_roles, processes, write_run
from tests.ray.test_runs import actors, node_of, refused
from tests.shared_memory import SharedFiles

STARTED_WITHIN_S = 240.0


@pytest.fixture(scope="module")
def machines(cluster: Any) -> Any:
    cluster.say(f"add workers {CPUS['workers']}")
    return cluster


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("ATROPOS_TEST_RUN", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[Killed] = []

    def begin(launcher: dict[str, Any], **more: Any) -> Killed:
        started.append(Killed(tmp_path, write_run(tmp_path, launcher, **more)))
        return started[-1]

    yield begin
    for one in started:
        one.end()


def workers(killed: Killed) -> list[int]:
    """How many there were, step by step."""
    lines = (killed.directory / "metrics.jsonl").read_text().splitlines()
    return [int(json.loads(line).get("launcher/workers/waiting", 0)) for line in lines]


@pytest.mark.timeout(600)
def test_workers_become_eight_and_one_again_while_the_run_goes_on(machines, begun, tmp_path):
    each = {"count": 8, "least": 1, "concurrency": 1, "cpus": 0, "other": {"workers": 0.01}}
    killed = begun(
        {**on_roles(machines.address), "workers": {"waiting": each}, "look_s": 3.0},
        wait=0.6,
        evaluation={"problems": 16, "every": 1},
    )
    killed.until("step", lambda: killed.steps > 1, STARTED_WITHIN_S)
    with SharedFiles().watching() as files:

        def are(count: int) -> bool:
            now = workers(killed)[-1]
            wait = 0.6 * now if count == 8 else 0.0  # so that a step takes as long with any number
            write_whole(tmp_path / "wait", str(wait))
            return now == count

        killed.until("eight workers", lambda: are(8), STARTED_WITHIN_S)
        there = {role: process for role, process in processes(killed.directory).items() if role.startswith("worker-")}
        assert set(there) == {f"worker-waiting-{n}" for n in range(1, 9)}
        assert len({node_of(process) for process in there.values()}) == 1, "on the machine that has what they take"
        assert node_of(there["worker-waiting-1"]) != node_of(processes(killed.directory)["trainer"])
        killed.until("one worker", lambda: are(1), STARTED_WITHIN_S)
        killed.until("end of the others", lambda: len(processes(killed.directory)) == 4, 120)
        before = killed.steps
        killed.until("further steps", lambda: killed.steps > before + 3)
        killed.stop()
    changes = re.findall(
        r"workers of waiting: (\d+) -> (\d+); the loop waited for groups (\d+)% of its time", killed.run.text
    )
    assert [(int(was), int(now)) for was, now, _ in changes][:4] == [(1, 2), (2, 3), (3, 5), (5, 8)], changes
    assert all(int(share) >= 25 for was, now, share in changes if int(now) > int(was)), changes
    assert all(int(share) <= 10 for was, now, share in changes if int(now) < int(was)), changes
    assert "starting again" not in killed.run.text
    accounts(tmp_path)
    ran_by = {json.loads(line)[0] for line in (tmp_path / "ledger").read_text().splitlines()}
    assert len(ran_by) >= 8, "each of them has run something"
    nothing_is_left(killed, files)
    assert actors(machines) == []


@pytest.mark.timeout(600)
def test_five_random_kills_lose_no_draw_and_train_none_twice(machines, begun, tmp_path):
    each = {"count": 2, "other": {"workers": 0.5}}
    killed = begun({**on_roles(machines.address), "workers": {"waiting": each}}, wait=0.5)
    killed.until("step", lambda: killed.steps > 1, STARTED_WITHIN_S)
    with SharedFiles().watching() as files:
        found = kill_at_random(killed, machines, 5, random.Random(20))
        assert {one["kind"] for one in found} == {"worker node", "engine node", "trainer node", "driver"}
        killed.stop()
    accounts(tmp_path)
    nothing_is_left(killed, files)
    assert actors(machines) == []


def test_a_worker_that_is_killed_is_started_again_and_a_server_ends_the_run_by_name(machines, begun, tmp_path):
    killed = begun({**on_roles(machines.address), "workers": {"waiting": {"count": 1, "concurrency": 2}}}, wait=0.2)
    killed.until("step", lambda: killed.steps > 1, STARTED_WITHIN_S)
    first = processes(killed.directory)["worker-waiting-1"]
    first.send_signal(signal.SIGKILL)
    killed.until("another worker", lambda: processes(killed.directory).get("worker-waiting-1", first) != first)
    assert re.search(
        r"worker-waiting-1 \(pid \d+ on [\d.]+\) was killed by SIGKILL.*: another is started", killed.run.text
    )
    before = killed.steps
    killed.until("step by it", lambda: killed.steps > before + 4)
    processes(killed.directory)["server"].send_signal(signal.SIGKILL)
    killed.until("start", lambda: "starting again from the last checkpoint" in killed.run.text)
    assert re.search(r"server \(pid \d+ on [\d.]+\) was killed by SIGKILL", killed.run.text), killed.run.text
    before = killed.steps
    killed.until("step behind it", lambda: killed.steps > before + 4)
    killed.stop()
    accounts(tmp_path)


def test_workers_that_end_as_soon_as_they_start_end_the_run_with_their_log(machines, begun):
    launcher = {**on_roles(machines.address), "workers": {"waiting": {"cpus": 0, "memory_gb": 0.01}}}
    killed = begun(launcher, wait="broken")
    assert killed.run.process.wait(STARTED_WITHIN_S) != 0
    said = killed.run.text
    assert said.count("worker-waiting-1 (pid") == 3 and said.count(": another is started") == 2, said
    assert "for the third time in a row" in said and "no worker of mine runs" in said
    assert "worker-waiting-1.log" in said and "Traceback" not in said.partition("for the third time")[0]
    assert actors(machines) == []


def test_workers_without_an_api_or_an_environment_are_refused(machines, tmp_path):
    ours = (
        "--launcher",
        "ray",
        "--set",
        f"launcher.address={machines.address}",
        "--set",
        "launcher.workers.gsm8k.cpus=0",
    )
    began = time.monotonic()
    said = refused(*ours, folder=tmp_path / "run")
    assert time.monotonic() - began < 150
    assert "launcher.workers has no effect: the run file has no [api], so the run itself runs its environments" in said
