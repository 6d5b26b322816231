"""Components that a run file names by their place, of every kind that it has: in the loop's process, and in others."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import metrics_of
from tests.pages.blocks import the_block

PARTS = Path(__file__).parent / "own_parts.py"
RUN = """
model = "toy"
seed = 3
[environment.sevens]
use = "./own_parts.py:Sevens"
[reward.environment]
use = "none"
[reward.short]
use = "./own_parts.py:short"
weight = 0.1
[reward.bonus]
use = "./own_parts.py:Bonus"
size = 2.0
runs_in = "process"
[engine]
use = "./own_parts.py:FileEngine"
[trainer]
use = "./own_parts.py:FileTrainer"
learning_rate = 3
[bridge]
use = "./own_parts.py:FileBridge"
[curriculum]
use = "./own_parts.py:Backwards"
[transform.group_advantage]
use = "none"
[transform.drop_flat]
use = "none"
[transform.centre]
use = "./own_parts.py:centre"
[teacher.silent]
use = "./own_parts.py:Silent"
[sink.lines]
use = "./own_parts.py:Lines"
name = "mine.txt"
[training]
steps = 4
groups_per_step = 2
group_size = 4
[evaluation]
problems = 2
[checkpoint]
every = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (made := tmp_path / "mine").mkdir()
    shutil.copy(PARTS, made)
    (made / "run.toml").write_text(RUN)
    return made


def test_a_run_of_components_from_a_file_alone_trains_in_four_processes_and_is_resumed_from_elsewhere(
    atropos: Callable[..., Any], folder: Path
) -> None:
    ended = atropos("run", "mine/run.toml", "--dir", "out")
    assert ended.code == 0, ended.err
    run = folder.parent / "out"
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["reward/bonus"] == 2.0 for row in rows[1:]) and rows[1]["reward/short"] < 0
    assert rows[-1]["policy/probe_shift_nats"] > 0, "the policy moved"
    assert rows[-1]["alignment/max_abs_logprob_diff"] < 1e-4, "and the engine with it"
    assert (run / "mine.txt").read_text().startswith("0 ")
    saved = tomllib.loads((run / "config.toml").read_text())
    for section in ("engine", "trainer", "bridge", "curriculum"):
        assert saved[section]["use"].startswith(f"{folder / 'own_parts.py'}:")
    (elsewhere := folder.parent / "elsewhere").mkdir()
    ended = atropos("resume", str(run), "--steps", "5", cwd=elsewhere)
    assert ended.code == 0, ended.err
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2, 3, 4, 5]
    assert json.loads((run / "summary.json").read_text())["steps"] == 5


def test_a_module_of_the_working_folder_is_found_by_a_process_of_its_own(
    atropos: Callable[..., Any], folder: Path
) -> None:
    (folder / "run.toml").write_text(RUN.replace("./own_parts.py:", "own_parts:"))
    ended = atropos("run", "run.toml", "--dir", "out", "--steps", "1", cwd=folder)
    assert ended.code == 0, ended.err


def test_the_code_of_a_component_that_changed_is_named_on_a_resume(atropos: Callable[..., Any], folder: Path) -> None:
    assert atropos("run", "mine/run.toml", "--dir", "out", "--steps", "1").code == 0
    with (folder / "own_parts.py").open("a") as file:
        file.write("# changed\n")
    ended = atropos("resume", "out", "--steps", "2")
    assert "changed: the code behind transform.centre.use" in ended.out.replace("\n", " "), ended.out


def test_the_reward_on_the_page_scores_a_run(atropos: Callable[..., Any], folder: Path) -> None:
    (folder / "shorter.py").write_text(the_block("docs/hooks.md", "import atropos_core as atropos").text)
    named = (
        "--env",
        "own_parts.py:Sevens",
        "--set",
        "reward.mine.use=./shorter.py:Shorter",
        "--set",
        "reward.mine.limit=3",
    )
    ended = atropos("run", "--model", "toy", *named, "--steps", "1", "--dir", "out", cwd=folder)
    assert ended.code == 0, ended.err
    rewards = metrics_of(folder / "out")[1]
    assert -1 <= rewards["reward/mine"] < 0 and "reward/environment" in rewards
