"""The container files, as far as a machine without a container engine can try them: both are linted, and the commands of the one for
a CPU are executed, with its folders below one of this test, on the files that `COPY` and `.dockerignore` give it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.conftest import REPOSITORY

FILES = sorted((REPOSITORY / "containers").glob("*.Dockerfile"))
FOLDERS = re.compile(r"(?<![\w./-])(/(?:source|build|wheels|opt|home/atropos))\b")
NOT_HERE = ("useradd ", "apt-get ")  # they change the machine
ARGUMENTS = {"TORCH_INDEX": "", "EXTRAS": "pandas"}  # as by --build-arg: small, and from where this machine gets it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def instructions(path: Path) -> list[tuple[str, str]]:
    with path.open("rb") as file:
        return [(one["instruction"], one["value"]) for one in DockerfileParser(fileobj=file).structure]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing(path):
    linter = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([linter, path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_runs_as_a_user_without_rights_and_starts_the_command(path):
    last = dict(instructions(path))
    assert last["USER"] == "1000" and last["ENTRYPOINT"] == '["atropos"]'
    assert last["FROM"] == "python:3.11-slim-bookworm"


@pytest.mark.skipif("DIST" not in os.environ, reason="installs torch: `make test-dist`")
def test_the_commands_for_a_cpu_make_an_installation_that_trains(tmp_path):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
        **ARGUMENTS, "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip

    def here(text: str) -> str:
        return FOLDERS.sub(lambda match: f"{tmp_path}{match[1]}", text)

    def ran(command: str, folder: Path) -> str:
        ended = subprocess.run(
            ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    folder, done = tmp_path, 0
    for instruction, value in instructions(REPOSITORY / "containers/cpu.Dockerfile"):
        if instruction == "WORKDIR":
            folder = Path(here(value))
            folder.mkdir(parents=True)
        elif instruction == "COPY":
            *sources, target = value.split()
            copy(sources, folder if target == "." else Path(here(target)))
        elif instruction == "RUN" and not value.startswith(NOT_HERE):
            ran(here(re.sub(r"^--mount=\S+ ", "", value)), folder)
            done += 1
    assert done == 3
    said = ran(
        f"{here('/opt/atropos')}/bin/atropos run --bridge ipc --env gsm8k --steps 2 --set evaluation.problems=16",
        folder,
    )
    assert "held-out accuracy" in said


def copy(sources: list[str], target: Path) -> None:
    if sources != ["."]:
        [source] = sources
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / source, target)
        return
    ignored = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not any(fnmatch(name.split("/")[0], pattern) for pattern in ignored):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, target / name, follow_symlinks=False)
