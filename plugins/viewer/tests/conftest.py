"""A run of the toy policy, made once by the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.cli import run_app

TOY = ("--model", "toy", "--engine", "toy", "--trainer", "toy", "--bridge", "local")
SMALL = ("--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "evaluation.problems=8")
TASKS = Path(__file__).with_name("sums.py")


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "sums"
    assert run_app(["run", *TOY, "--env", f"{TASKS}:Sums", *SMALL, "--steps", "5", "--dir", str(directory)]) == 0
    return directory
