"""A plugin that `atropos new` writes, as its users meet it: a wheel, in an environment that has only wheels."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests import wheels
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of core, of each plugin, and of a new plugin `env_hello`."""
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-m", "atropos_core", "new", "environment", "hello", "--dir", folder], check=True)
    plugins = sorted(path.parent for path in (REPOSITORY / "plugins").glob("*/pyproject.toml"))
    wheels.build(folder, REPOSITORY, *plugins, folder / "env_hello")
    return folder


@pytest.fixture(scope="module")
def clean(made: Path) -> Path:
    """The `bin` of a fresh environment with these wheels. What they depend on (torch is a gigabyte) is borrowed from
    this one; our own editable installs are not."""
    folder = made / "clean"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin/python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([*install, *made.glob("*.whl")], check=True, timeout=120)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    (Path(site.stdout.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def atropos(clean: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [clean / "atropos", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=240,
        env={**environment, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
    )  # fmt: skip


def test_a_new_plugin_is_listed_checked_and_trained_from_its_wheel(clean, tmp_path):
    where = subprocess.run(
        [clean / "python", "-c", "import atropos_core, atropos_env_hello as e; print(atropos_core.__file__, e.__file__)"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert str(REPOSITORY) + os.sep not in where.stdout, "the wheels are used, not the checkout"
    listed = atropos(clean, tmp_path, "plugins")
    assert listed.returncode == 0, listed.stderr
    assert "atropos-plugin-env-hello 0.1.0" in listed.stdout
    assert "broken" not in listed.stdout
    checked = atropos(clean, tmp_path, "check", "hello")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ran = atropos(
        clean, tmp_path, "run", "--env", "hello", "--steps", "2", "--set", "evaluation.problems=8", "--dir", "run"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tiny" in ran.stdout
    assert "one copy of the weights" in ran.stdout
    assert (tmp_path / "run/checkpoints/step-000002/policy/model.safetensors").is_file()
