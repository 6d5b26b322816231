"""`pip install atropos-rl` as a stranger does it: into a clean environment, by pip alone, from the wheels in dist/ and from what
the package index has. `make test-dist` builds the wheels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import httpx
import pytest

from tests import wheels
from tests.conftest import REPOSITORY

DIST = Path(os.environ.get("DIST", REPOSITORY / "dist")).resolve()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif("DIST" not in os.environ, reason="needs wheels: `make test-dist`"),
]
WHEELS = sorted(DIST.glob("*.whl"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not WHEELS:
        pytest.fail(f"no wheels in {DIST}: `make dist` builds them")


class Stranger:
    """An environment that had nothing but pip, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv/bin"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
        self.before = self.files()

    def files(self) -> set[str]:
        """All but what Python writes as it runs."""
        return {
            str(path.relative_to(self.folder))
            for path in (self.folder / "venv").rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    def pip(self, *arguments: str) -> str:
        options = ["--disable-pip-version-check"]
        return self.run("python", "-m", "pip", *arguments[:1], *options, *arguments[1:], timeout=600)

    def run(self, program: str, *arguments: str, timeout: float = 240) -> str:
        ended = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return {**kept, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    one = Stranger(tmp_path_factory.mktemp("stranger"))
    one.pip(
        "install", "-q", "-c", str(REPOSITORY / "environments/constraints.txt"), "--find-links", str(DIST), "atropos-rl"
    )
    return one


@pytest.fixture(scope="module")
def trained(stranger: Stranger) -> Path:
    run = stranger.folder / "first"
    said = stranger.run(
        "atropos",
        "run",
        "--bridge",
        "ipc",
        "--env",
        "gsm8k",
        "--steps",
        "6",
        "--set",
        "evaluation.problems=64",
        "--dir",
        "first",
    )
    assert "one copy of the weights" in said
    assert "held-out accuracy" in said
    return run


def test_one_package_brings_a_whole_that_trains(stranger, trained):
    assert (trained / "checkpoints/step-000006/policy/model.safetensors").is_file()
    listed = stranger.run("atropos", "plugins")
    for kind in ("hf", "grpo", "ipc", "checkpoint", "gsm8k"):
        assert kind in listed
    assert "broken" not in listed
    assert "24gb-qwen2.5-1.5b-lora" in stranger.run("atropos", "recipes"), "the run files are in a wheel"
    where = stranger.run(
        "python", "-c", "import atropos_core, atropos_engine_hf as e; print(atropos_core.__file__, e.__file__)"
    )
    assert str(REPOSITORY) + os.sep not in where


def test_the_trained_run_opens_as_a_page(stranger, trained):
    viewing = subprocess.Popen(
        [stranger.bin / "atropos", "view", trained], cwd=stranger.folder, env=stranger.environment, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        address = next(word for line in lines(viewing) for word in line.split() if word.startswith("http://"))
        page = httpx.get(address, timeout=20, follow_redirects=True)
        assert page.status_code == 200
        assert "<title" in page.text
    finally:
        viewing.terminate()
        viewing.wait(20)


def test_a_new_plugin_is_listed_checked_and_trained_from_its_wheel(stranger):
    stranger.run("atropos", "new", "environment", "hello")
    [wheel] = wheels.build(stranger.folder / "hello", stranger.folder / "env_hello")
    stranger.pip("install", "-q", "--no-deps", str(wheel))
    listed = stranger.run("atropos", "plugins")
    assert "atropos-plugin-env-hello 0.1.0" in listed
    assert "broken" not in listed
    stranger.run("atropos", "check", "hello")
    said = stranger.run(
        "atropos", "run", "--env", "hello", "--steps", "2", "--set", "evaluation.problems=8", "--dir", "second"
    )
    assert "tiny" in said
    assert "one copy of the weights" in said
    assert (stranger.folder / "second/checkpoints/step-000002/policy/model.safetensors").is_file()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    until = time.monotonic() + 60
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        assert time.monotonic() < until


def test_every_extra_resolves_to_packages_of_ours_that_exist():
    """pip would say so too, after it had downloaded vLLM."""
    ours = {name_of(wheel) for wheel in WHEELS}
    required = {line.split(";")[0] for wheel in WHEELS for line in metadata(wheel).get_all("Requires-Dist", [])}
    named = {line.split("[")[0].split("<")[0].split(">")[0].strip() for line in required if line.startswith("atropos")}
    assert named <= ours
    brought = set(metadata(wheel_of("atropos-rl")).get_all("Requires-Dist", []))
    assert {name for name in ours if name.startswith("atropos-plugin-")} == {
        line.split("[")[0].split("<")[0] for line in brought if line.startswith("atropos-plugin-")
    }, "each plugin is in atropos-rl or in one of its extras"


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name.partition("-")[0])
def test_a_wheel_says_what_it_is_and_brings_its_licence(wheel):
    said = metadata(wheel)
    assert said["License-Expression"] == "MIT"
    assert said["Summary"] and said["Keywords"]
    assert "Programming Language :: Python :: 3.13" in said.get_all("Classifier", [])
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        [licence] = [name for name in names if name.endswith("licenses/LICENSE")]
        assert packed.read(licence) == (REPOSITORY / "LICENSE").read_bytes()
        assert name_of(wheel) == "atropos-rl" or any(name.endswith("/py.typed") for name in names)
        assert not [name for name in names if name.endswith((".pyc", ".orig")) or name.startswith("tests/")]


def test_what_pip_takes_away_leaves_nothing(stranger, trained):
    """The last of this file: the environment is empty afterwards."""
    frozen = json.loads(stranger.pip("list", "--format", "json"))
    installed = [each["name"] for each in frozen if each["name"] != "pip"]
    stranger.pip("uninstall", "-q", "-y", *installed)
    assert stranger.files() <= stranger.before, (
        "setuptools, which Python's venv has and torch wants newer, is gone as well"
    )


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as packed:
        [name] = [each for each in packed.namelist() if each.endswith(".dist-info/METADATA")]
        return message_from_string(packed.read(name).decode())


def name_of(wheel: Path) -> str:
    return metadata(wheel)["Name"]


def wheel_of(name: str) -> Path:
    return next(wheel for wheel in WHEELS if name_of(wheel) == name)
