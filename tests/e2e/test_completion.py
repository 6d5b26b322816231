"""What a shell completes, by the scripts that `atropos completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPLETE = """
source "$SCRIPT"
completed() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _atropos_completion atropos
    echo "${COMPREPLY[*]}"
}
"""
LINES = {
    'atropos res': "resume rescore",
    'atropos run --env gs': "gsm8k",
    'atropos run --bridge i': "ipc",
    'atropos run --engine to': "toy",
    'atropos run --dete': "--deterministic",
    'atropos run --set checkpoint.': "checkpoint.every= checkpoint.keep= checkpoint.other_tasks=",
    'atropos run --engine toy --set engine.lat': "engine.latency_s=",
    'atropos run --env gsm8k --set environment.gsm8k.source': "environment.gsm8k.source=",
    'atropos resume ""': "runs/a-2 runs/a-1",
    'atropos doctor elsewhere/': "elsewhere/b",
    'atropos plugins tensor': "tensorboard",
    'atropos run --env ./su': "",
}  # fmt: skip


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds `atropos`, and its script for bash."""
    command = tmp_path / "bin" / "atropos"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m atropos_core "$@"\n')
    command.chmod(0o755)
    (tmp_path / "script").write_text(script("bash"))
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "SCRIPT": str(tmp_path / "script")}


def script(shell: str) -> str:
    made = [sys.executable, "-m", "atropos_core", "completion", shell]
    return subprocess.run(made, check=True, capture_output=True, text=True, timeout=120).stdout


def test_bash_completes_commands_flags_components_runs_and_keys(installed, tmp_path):
    for at, name in enumerate(("runs/a-1", "runs/a-2", "elsewhere/b", "runs/no-run")):
        (tmp_path / name).mkdir(parents=True)
        if name != "runs/no-run":
            (tmp_path / name / "config.toml").touch()
        os.utime(tmp_path / name, (1000 + at, 1000 + at))
    code = COMPLETE + "".join(f"completed {line}\n" for line in LINES)
    ended = subprocess.run(
        ["bash", "-c", code], env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert dict(zip(LINES, ended.stdout.splitlines(), strict=True)) == LINES, ended.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_one_that_it_can_read(shell, tmp_path):
    made = script(shell)
    assert "_ATROPOS_COMPLETE=complete_" + shell in made
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script's syntax is not checked")
    (tmp_path / "script").write_text(made)
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)
