"""Commands that run a component's code end soon after Ctrl-C or SIGTERM, also while that code blocks the event loop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import TOY
from tests.e2e.runs import finish
from tests.waiting import wait_until

ENDS_WITHIN_S = 60  # of code that blocks for ten minutes, on a busy machine
BLOCKING = """
import os, time
import numpy as np
from sevens import Sevens

def began():
    with open(os.environ["BEGAN"], "a") as file:
        file.write("x")

async def sleeps(task, episodes):
    began()
    for _ in range(600):
        time.sleep(1)
    return np.zeros(len(episodes))

async def computes(task, episodes):
    began()
    end = time.monotonic() + 600
    while time.monotonic() < end:
        pass
    return np.zeros(len(episodes))

class Closes:
    async def __call__(self, task, episodes):
        began()
        time.sleep(600)

    async def close(self):
        time.sleep(600)

class Blocks(Sevens):
    async def score(self, task, reply):
        began()
        time.sleep(600)

async def transform(groups):
    began()
    time.sleep(600)
    return groups
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocking")
    (folder / "sevens.py").write_text(TOY)
    (folder / "blocking.py").write_text(BLOCKING)
    finish(folder / "run", "run", "--deterministic", "--steps", "2", "--model", "toy", "--env", f"{folder}/sevens.py:Sevens",
           "--dir", str(folder / "run"), "--set", "trainer.learning_rate=20.0", "--set", "checkpoint.every=1",
           "--set", "evaluation.problems=0")  # fmt: skip
    return folder


class Command:
    """`atropos ARGUMENTS` as a process whose components say when they begin."""

    def __init__(self, folder: Path, tmp: Path, *arguments: str, blocked_after_s: str = "300") -> None:
        self.began, self.temporary = tmp / "began", tmp / "temporary"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atropos_core", *arguments],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "300", "BEGAN": str(self.began), "TMPDIR": str(self.temporary)}
            | {"ATROPOS_BLOCKED_AFTER_S": blocked_after_s},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def wait_until_it_blocks(self) -> list[psutil.Process]:
        """Return the processes that it started."""
        wait_until(self.began.exists, "a call of the component")
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=ENDS_WITHIN_S)
        return self.process.returncode, " ".join(said.split())

    @property
    def calls(self) -> int:
        return len(self.began.read_text())


@contextlib.contextmanager
def running(folder: Path, tmp: Path, *arguments: str, **options: str) -> Iterator[Command]:
    command = Command(folder, tmp, *arguments, **options)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.communicate()


COMMANDS = {
    "rescore": ("rescore", "run", "--reward", "./blocking.py:{}", "--out", "{tmp}/out.jsonl"),
    "replay": ("replay", "run", "--step", "2", "--reward", "./blocking.py:{}"),
    "eval": ("eval", "--model", "toy", "--env", "./sevens.py:Sevens", "--reward", "./blocking.py:{}", "--out", "{tmp}/out"),
    "process": ("process", "--model", "toy", "--env", "./sevens.py:Sevens", "--reward", "./blocking.py:{}", "--groups", "8",
                "--out", "{tmp}/out.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "code", "number"),
    [
        ("rescore", "sleeps", signal.SIGINT),
        ("rescore", "computes", signal.SIGTERM),
        ("rescore", "Closes", signal.SIGTERM),
        ("replay", "computes", signal.SIGINT),
        ("replay", "sleeps", signal.SIGTERM),
        ("eval", "sleeps", signal.SIGINT),
        ("process", "computes", signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_command_whose_reward_blocks_the_event_loop(name, code, number, recorded, tmp_path):
    arguments = [one.format(code, tmp=tmp_path) for one in COMMANDS[name]]
    with running(recorded, tmp_path, *arguments) as command:
        started = command.wait_until_it_blocks()
        command.process.send_signal(number)
        ended, said = command.ended()
        assert (ended, "Interrupted stopped: " in said, "Traceback" in said) == (130, True, False), said
        assert command.calls == 1 or name == "process", "no other reward began"
        assert not psutil.wait_procs(started, 30)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["began", "temporary"], "nothing is half written"
    assert list(command.temporary.iterdir()) == []


def test_the_first_reward_that_blocks_ends_rescoring_with_an_error_that_names_it(recorded, tmp_path):
    arguments = [one.format("sleeps", tmp=tmp_path) for one in COMMANDS["rescore"]]
    with running(recorded, tmp_path, *arguments, blocked_after_s="0.5") as command:
        ended, said = command.ended()
    assert ended == 1
    assert said.startswith("EventLoopBlocked reward 'sleeps', task 'train-"), said
    assert "blocking.py:13 in sleeps() blocked the event loop for 0.5 s" in said and "asyncio.to_thread" in said
    assert command.calls == 1 and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--reward", "./blocking.py:sleeps"), "reward 'sleeps'"),
        (("--env", "./blocking.py:Blocks"), "rollout() of Blocks"),
    ],
)
def test_a_run_in_which_every_call_blocks_ends_after_the_third_with_an_error_that_names_it(
    flags, named, recorded, tmp_path
):
    environment = () if "--env" in flags else ("--env", "./sevens.py:Sevens")
    arguments = ("run", "--model", "toy", *environment, *flags, "--dir", str(tmp_path / "run"), "--steps", "2")
    with running(recorded, tmp_path, *arguments, blocked_after_s="0.5") as command:
        ended, said = command.ended()
    assert ended == 1 and command.calls in (3, 4), said  # one more may have begun
    assert f"EventLoopBlocked {named}, 3 times in a row: blocking.py" in said, said
    assert f"{named} was interrupted and counts as failed: blocking.py" in said


def test_the_first_reward_that_blocks_ends_a_replay_with_an_error_that_names_it(recorded, tmp_path):
    arguments = [one.format("computes", tmp=tmp_path) for one in COMMANDS["replay"]]
    with running(recorded, tmp_path, *arguments, blocked_after_s="0.5") as command:
        ended, said = command.ended()
    assert (ended, command.calls) == (1, 1)
    assert "EventLoopBlocked reward 'computes', task 'train-" in said and "asyncio.to_thread" in said


def test_a_transform_and_an_environment_that_block_end_rescoring_by_name(recorded, tmp_path):
    changed = tmp_path / "changed.toml"
    changed.write_text(
        f'[environment.sevens]\nuse = "{recorded}/blocking.py:Blocks"\n[reward.environment]\nuse = "environment"\n'
    )
    for name, flags in {
        "transform 'slow'": ("--set", "transform.slow.use=./blocking.py:transform"),
        "score() of task 'train-": ("--config", str(changed), "--environments"),
    }.items():
        (tmp_path / name.split()[0]).mkdir()
        with running(recorded, tmp_path / name.split()[0], "rescore", "run", *flags, blocked_after_s="0.5") as command:
            ended, said = command.ended()
        assert (ended, command.calls) == (1, 1), said
        assert said.startswith(f"EventLoopBlocked {name}"), said


def test_the_second_request_ends_a_run_whose_environment_blocks_the_event_loop(recorded, tmp_path):
    arguments = ("run", "--model", "toy", "--env", "./blocking.py:Blocks", "--dir", str(tmp_path / "run"), "--steps", "2",
                 "--set", "evaluation.problems=0")  # fmt: skip
    with running(recorded, tmp_path, *arguments) as command:
        started = command.wait_until_it_blocks()
        command.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # further apart than TWICE_S
            command.process.wait(1)
        command.process.send_signal(signal.SIGTERM)
        ended, said = command.ended()
        assert ended == 130, said
        assert "ended at once" in said and not psutil.wait_procs(started, 30)[1]
