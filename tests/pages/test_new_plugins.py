"""What `atropos new` prints and writes as the next command, for each kind of plugin: it trains, or exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from atropos_testing.new_command import KINDS
from tests.conftest import REPOSITORY, in_front
from tests.unit.cli.test_new import PYTHON, every_kind, installed, ok

__all__ = ["every_kind", "installed"]  # fixtures

CALCULATOR = REPOSITORY / "plugins/agent_api/atropos_agent_api/examples/calculator.toml"
OF_TINY = ("teacher", "loss", "launcher")  # what the toy's trainer has no use for


@pytest.mark.parametrize("kind", KINDS)
def test_what_new_suggests_trains_or_exports(
    kind: str, installed: dict[str, Path], tmp_path: Path, sevens: str
) -> None:
    """But for the policy, which is the toy where it can be, the environment and the steps."""
    folder = installed[kind]
    command = KINDS[kind].run.format(name="hello").replace("./file.py:Class", sevens)
    if kind == "sandbox":
        shutil.copy(CALCULATOR, tmp_path / "agent.toml")
    elif kind not in OF_TINY and "--model" not in command:
        command = command.replace("--env gsm8k", f"--env {sevens} --model toy")
    if "--steps" not in command:
        command += " --steps 2"
    groups, size = (1, 2) if kind == "sandbox" else (2, 4)  # each rollout there starts a program
    values = (f"training.groups_per_step={groups}", f"training.group_size={size}", "evaluation.problems=2")
    small = [part for value in values for part in ("--set", value)]
    if kind == "adapter":
        command = KINDS[kind].run.format(name="hello").replace("gsm8k", sevens)
        ok(*PYTHON, "atropos_core", *command.split()[1:], cwd=tmp_path, PYTHONPATH=in_front(folder))
        assert len((tmp_path / "tasks/sevens.jsonl").read_text().splitlines()) == 16
        return
    parts = [*command.split()[1:], *small, "--set", "sampling.max_tokens=8", "--dir", "run"]
    out = ok(*PYTHON, "atropos_core", *parts, cwd=tmp_path, PYTHONPATH=in_front(folder), OMP_NUM_THREADS="1")
    steps = 20 if "--steps 20" in command else 2
    assert f"step {steps}/{steps}" in out or kind == "sink"
    assert (tmp_path / "run/metrics.jsonl").is_file(), "which `atropos doctor` and others read"
    saved = json.loads((tmp_path / "run/summary.json").read_text())
    assert saved["steps"] == steps
