"""`open` of a component reaches it wherever it runs; what fails or hangs in it is said in one line that names it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun

HERE = Path(__file__).parent
RUN = """
model = "toy"
[environment.sevens]
use = "./own_parts.py:Sevens"
[training]
steps = 1
groups_per_step = 2
group_size = 2
[evaluation]
problems = 0
"""
MEMBERS = """
[reward.both]
use = "ensemble"
combine = "mean"
[reward.both.members.bonus]
use = "./own_openings.py:{name}"
runs_in = "{runs_in}"
[reward.both.members.zero]
use = "./own_openings.py:zero"
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "own_parts.py").write_text((HERE / "own_parts.py").read_text())
    source = (HERE / "own_openings.py").read_text()
    (tmp_path / "own_openings.py").write_text(source.replace("tests.e2e.own_parts", "own_parts"))

    def run_file(sections: str) -> str:
        (tmp_path / "run.toml").write_text(RUN + sections)
        return "run.toml"

    return run_file


def reward(name: str, runs_in: str = "here") -> str:
    return f'[reward.bonus]\nuse = "./own_openings.py:{name}"\nruns_in = "{runs_in}"\n'


def test_open_and_close_reach_a_reward_and_a_member_in_processes_of_their_own(
    atropos: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    both = reward("Opened", "process") + MEMBERS.format(name="Opened", runs_in="process")
    ended = atropos("run", write(both), "--dir", "out")
    assert ended.code == 0, ended.err
    last = metrics_of(tmp_path / "out")[-1]
    assert (last["reward/bonus"], last["reward/both"]) == (1.0, 0.5)
    assert (tmp_path / "notes").read_text() == "closed\n" * 2


LINE = next(
    number
    for number, line in enumerate((HERE / "own_openings.py").read_text().splitlines(), 1)
    if "the line that is named" in line
)
CAUSE = f"could not open: FileNotFoundError: [Errno 2] No such file or directory: 'bonus.txt' (own_openings.py:{LINE})"


@pytest.mark.parametrize(
    ("named", "sections"),
    [
        ("reward 'bonus'", reward("Missing")),
        ("reward 'bonus'", reward("Missing", "process")),
        ("reward 'both.bonus'", MEMBERS.format(name="Missing", runs_in="here")),
        ("reward 'both.bonus'", MEMBERS.format(name="Missing", runs_in="process")),
        ("environment 'other'", '[environment.other]\nuse = "./own_openings.py:MissingEnvironment"\n'),
        ("teacher 'one'", '[teacher.one]\nuse = "./own_openings.py:MissingTeacher"\n'),
        ("sink 'one'", '[sink.one]\nuse = "./own_openings.py:MissingSink"\n'),
    ],
)
def test_what_open_raises_is_one_line_with_the_component_and_its_line(
    atropos: Callable[..., Any], write: Callable[..., str], named: str, sections: str
) -> None:
    ended = atropos("run", write(sections), "--dir", "out")
    assert ended.code == 2, ended.err
    assert f"PluginError {named} {CAUSE}" in ended.err
    assert "Traceback" not in ended.err and "What to do: Fix that line" in ended.err


def test_an_open_that_is_no_coroutine_is_named(atropos: Callable[..., Any], write: Callable[..., str]) -> None:
    ended = atropos("run", write(reward("NoCoroutine")), "--dir", "out")
    assert ended.code == 2, ended.err
    assert "PluginError reward 'bonus' could not open: its open() is not a coroutine." in ended.err
    assert "Begin it with `async def`." in ended.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("misshapen", "PluginError transform 'mine' gave the group of task 'train-"),
        ("raises", "PluginError transform 'mine' failed: TypeError: "),
    ],
)
def test_a_transform_that_fails_or_gives_a_wrong_shape_is_named(
    atropos: Callable[..., Any], write: Callable[..., str], name: str, said: str
) -> None:
    ended = atropos("run", write(f'[transform.mine]\nuse = "./own_openings.py:{name}"\n'), "--dir", "out")
    assert ended.code == 2, ended.err
    assert said in ended.err and "Traceback" not in ended.err


def test_a_curriculum_that_draws_nothing_ends_the_run_by_name(
    atropos: Callable[..., Any], write: Callable[..., str]
) -> None:
    ended = atropos("run", write('[curriculum]\nuse = "./own_openings.py:Empty"\n'), "--dir", "out", timeout=40)
    assert ended.code == 2, ended.err
    assert "PluginError the curriculum gave no draw where" in ended.err


def test_check_names_the_line_of_the_component_itself(atropos: Callable[..., Any], write: Callable[..., str]) -> None:
    write("")
    ended = atropos("check", "./own_openings.py:Missing", "--kind", "reward")
    assert f"(own_openings.py:{LINE})" in ended.out.replace("\n", " ") and "pathlib" not in ended.out


@pytest.mark.parametrize("runs_in", ["here", "process"])
def test_a_signal_ends_a_start_that_hangs_at_once_and_says_what_was_waited_for(
    write: Callable[..., str], tmp_path: Path, runs_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunningRun(tmp_path / "out", "run", write(reward("Hangs", runs_in)), "--dir", "out")
    try:
        until = time.monotonic() + 60
        waits = "reward 'bonus' to open" if runs_in == "here" else "reward-bonus: reward 'bonus' to open"
        while f"waiting for {waits}" not in run.text:
            assert run.process.poll() is None and time.monotonic() < until, run.text
            time.sleep(0.05)
        run.process.send_signal(signal.SIGTERM)
        run.process.wait(60)
    finally:
        run.process.kill()
    text = run.text.replace("\n", " ")
    assert f"{waits}, " in text.partition("stopped before the first step, waiting for")[2]
    assert "saving" not in text


SLOW = """
import asyncio

async def slow(task, episodes):
    await asyncio.sleep(1.5)
    return [0.0 for _ in episodes]
"""


def test_without_a_terminal_only_the_first_of_slow_steps_is_said_to_be_waited_for(
    atropos: Callable[..., Any], write: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    run = write('[reward.slow]\nuse = "./slow.py:slow"\n[checkpoint]\nevery = 0\n')
    ended = atropos("run", run, "--dir", "out", "--steps", "3")
    assert ended.code == 0, ended.err
    assert [line for line in ended.err.splitlines() if line.startswith("waiting for step")] == ["waiting for step 1"]
