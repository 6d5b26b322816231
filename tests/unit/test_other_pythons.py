"""Which interpreters `make test-pythons` takes, what it installs, and what it skips."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.conftest import REPOSITORY
from tools import other_pythons

VERSION = "{}.{}".format(*sys.version_info[:2])


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_shim_that_does_not_run_is_passed_over_and_what_runs_is_taken(tmp_path):
    program(tmp_path / f"shims/python{VERSION}", "#!/bin/sh\nexit 127\n")
    real = program(
        tmp_path / f"pyenv/versions/{VERSION}.1/bin/python{VERSION}", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    )
    assert other_pythons.interpreter(VERSION, str(tmp_path / "shims"), tmp_path / "pyenv") == real
    assert other_pythons.interpreter(VERSION, str(tmp_path / "shims"), tmp_path / "nothing") is None


def test_one_of_another_version_is_not_taken(tmp_path):
    program(tmp_path / "bin/python3.99", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert other_pythons.interpreter("3.99", str(tmp_path / "bin"), tmp_path) is None


def test_a_version_that_is_not_there_is_named(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tools.other_pythons", "3.99"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("NOT TESTED on Python 3.99")


def test_what_stands_on_torch_is_not_installed():
    names = {
        path.name
        for path in other_pythons.without_torch(
            path.parent
            for path in [*REPOSITORY.glob("libs/*/pyproject.toml"), *REPOSITORY.glob("plugins/*/pyproject.toml")]
        )
    }
    assert {"env_gsm8k", "trajectory_api", "agent_api"} <= names
    assert not {"engine_hf", "trainer_grpo", "bridge_ipc", "bridge_delta", "env_verifiers", "launcher_ray"} & names


TESTS = """
import pytest


def test_fine():
    assert True


def test_component():
    raise AssertionError("there is no engine named 'hf'. Choose one of: toy.")


def test_wrong():
    raise AssertionError("there is no engine named 'hg'. Choose one of: toy.")
"""


def test_a_skipped_test_names_the_package_and_a_failure_of_another_kind_stays_one(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("import torch\n\ndef test_it():\n    assert torch\n")
    (tmp_path / "test_three.py").write_text("import no_such_package_at_all\n")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in "_pytest iniconfig packaging pluggy py.py pygments pytest".split():  # pytest, and nothing else
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if path.name == name or path.name.startswith(f"{name}-"):
                (packages / path.name).symlink_to(path)
    options = ["-c", "/dev/null", f"--rootdir={tmp_path}", "-rs", "--continue-on-collection-errors"]
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "pytest", "-p", "tests.missing", "-p", "no:cacheprovider", *options, *tmp_path.glob("*.py")],
        cwd=REPOSITORY, env={"PYTHONPATH": f"{packages}:{REPOSITORY}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "needs atropos_engine_hf, which is not installed" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout and "2 skipped" in ended.stdout and "1 error" in ended.stdout, (
        ended.stdout
    )
    assert "needs torch, which is not installed" in ended.stdout
