"""`atropos serve-agent`: programs that somebody else starts take the episodes of a real run, and may be killed like the run itself."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY, metrics_of
from tests.e2e.roles import scene
from tests.e2e.runs import RunningRun

pytestmark = pytest.mark.slow

TAKER = REPOSITORY / "plugins/agent_api/atropos_agent_api/examples/take_episodes.py"
AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"model": "any", "messages": task["messages"]}).encode()
key = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
SMALL = (
    "--set", "environment.agent.tasks_from=gsm8k", "--set", "training.groups_per_step=2", "--set", "training.group_size=4",
    "--set", "evaluation.problems=4", "--set", "checkpoint.every=1", "--set", "environment.agent.limits.wall_s=10.0",
)  # fmt: skip


class Takers:
    """Processes that take episodes, each in a group of its own with the agents that it starts."""

    def __init__(self, folder: Path, url: str, token: Path) -> None:
        (folder / "agent.py").write_text(AGENT)
        self._command = [sys.executable, str(TAKER), url, str(token), sys.executable, "-S", str(folder / "agent.py")]
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    process.kill()
            process.communicate()


@contextlib.contextmanager
def serving(folder: Path, *more: str) -> Iterator[tuple[RunningRun, Takers]]:
    """A run that offers its episodes, and who takes them."""
    run = RunningRun(folder, "serve-agent", "--dir", str(folder), "--port", "0", *SMALL, *more)
    try:
        takers = Takers(folder.parent, offered(run), folder / "agents" / "environment.agent.token")
        try:
            yield run, takers
        finally:
            takers.close()
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
        run.process.wait(60)


def offered(run: RunningRun, times: int = 1) -> str:
    """The address, once it was said so often."""
    until = time.monotonic() + 120
    while len(found := re.findall(r"episodes are offered at (\S+)", run.text)) < times:
        assert run.process.poll() is None and time.monotonic() < until, run.text
        time.sleep(0.05)
    url: str = found[-1]
    return url


def test_programs_that_somebody_starts_are_trained_and_one_that_is_killed_loses_no_other_episode(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "run", "--steps", "3") as (run, takers):
        first = takers.start()
        time.sleep(0.3)
        second, third = takers.start(), takers.start()
        run.wait_for_step(1)
        while not (agents := psutil.Process(first.pid).children()):
            time.sleep(0.002)
        first.kill()
        for agent in agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.kill()
        assert run.process.wait(240) == 0, run.text
        for taker in (second, third):
            assert "the run has ended" in taker.communicate(timeout=90)[1]
        lines = metrics_of(run.folder)
        assert len(lines) == 4
        assert sum(line["rollouts/failed"] + line.get("agent/limits_reached", 0.0) for line in lines[1:]) > 0, (
            "the lost one"
        )
        for line in lines[1:]:
            assert line["rollouts/count"] + line["rollouts/failed"] >= 8.0
            assert line["alignment/max_abs_logprob_diff"] <= 1e-4


def test_a_run_that_is_killed_is_resumed_and_its_takers_go_on(tmp_path: Path) -> None:
    """The address is that of the run file then, and the token the one that was made."""
    chosen = random.Random(0)
    port = chosen.randint(20_000, 30_000)
    folder = tmp_path / "run"
    with serving(folder, "--steps", "4", "--port", str(port)) as (run, takers):
        working = [takers.start(), takers.start()]
        run.wait_for_step(1)
        run.kill("supervisor")
        run.process.wait(60)
        time.sleep(1.0)
        resumed = RunningRun(folder, "resume", str(folder))
        try:
            assert offered(resumed, 2).endswith(f":{port}")
            assert resumed.process.wait(240) == 0, resumed.text
        finally:
            resumed.process.kill()
        for taker in working:
            assert "the run has ended" in taker.communicate(timeout=90)[1]
        steps = [line["step"] for line in metrics_of(folder)]
        assert steps == [0, 1, 2, 3, 4], "each once"


def test_a_worker_of_a_trainer_elsewhere_offers_its_episodes_too(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text(
        '[environment.agent]\ntasks_from = "gsm8k"\n[environment.agent.sandbox]\nuse = "external"\nport = 0\n'
    )
    small = ("training.groups_per_step=2", "training.group_size=4", "evaluation.problems=0")
    with scene(tmp_path) as place:
        trainer = place.train("--model", "tiny", "--steps", "2", *(word for one in small for word in ("--set", one)))
        worker = place.worker(1, "agent", "--file", "worker.toml")
        url, token = worker.says(r"episodes are offered at (\S+)", 120), worker.says(r"token +(/\S+)")
        takers = Takers(tmp_path, url, Path(token))
        try:
            taking = [takers.start(), takers.start()]
            assert trainer.ends(240) == 0, place.all_text
            assert max(line["agent/calls"] for line in place.metrics) == 1.0
            assert worker.terminate() == 0
            for taker in taking:
                assert "the run has ended" in taker.communicate(timeout=90)[1]
        finally:
            takers.close()
    assert not Path(token).exists(), "what a worker makes for itself goes with it"


def test_an_evaluation_offers_its_episodes_too(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-word-of-many-letters\n")
    token.chmod(0o600)
    sandbox = f'environment.agent.sandbox={{use="external", port=0, token_file="{token}"}}'
    run = RunningRun(
        tmp_path / "unused", "eval", "--env", "agent", "--model", "tiny", "--problems", "6", "--out", str(tmp_path / "out"),
        "--set", sandbox, "--set", "environment.agent.tasks_from=gsm8k",
    )  # fmt: skip
    takers = Takers(tmp_path, offered(run), token)
    try:
        taker = takers.start()
        assert run.process.wait(120) == 0, run.text
        assert "the run has ended" in taker.communicate(timeout=90)[1]
    finally:
        takers.close()
        run.process.kill()
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["metrics"]["eval/problems"] == 6 and figures["metrics"]["eval/agent/calls"] == 1.0
