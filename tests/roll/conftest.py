"""These tests need gem, in an environment of its own; those in an actor Ray, those with ROLL's classes a checkout."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.left_out import NONE_OF_THEM, stand_in

HERE = Path(__file__).parent
HAS_GEM = importlib.util.find_spec("gem") is not None

if source := os.environ.get("ROLL_SOURCE"):
    sys.path.insert(0, source)
if not HAS_GEM:
    collect_ignore_glob = NONE_OF_THEM  # they import gem


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which ROLL this was, and what of it and of what it runs with is otherwise than known."""
    if HAS_GEM:
        terminalreporter.section("ROLL")
        for line in description_of_roll():
            terminalreporter.line(line)


def description_of_roll() -> list[str]:
    if not source:
        return ["ROLL_SOURCE names no checkout: only our own implementation of its contract was tested"]
    from atropos_adapter_roll import signatures

    described = subprocess.run(
        ["git", "-C", source, "log", "-1", "--format=%h of %as"], capture_output=True, text=True, check=False
    )
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        differs = signatures.differences() or [f"interfaces as known of {signatures.KNOWN_AS_OF}"]
    return [
        f"{source}, commit {described.stdout.strip() or 'unknown'}",
        *differs,
        f"its requirements_common.txt asks for {', '.join(other_versions())}",
    ]


def other_versions() -> list[str]:
    """What ROLL's requirements_common.txt asks for, where something else is installed, or nothing."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for line in (Path(source or "") / "requirements_common.txt").read_text().splitlines():
        try:
            wanted = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue  # a comment, a path, or another file
        try:
            installed = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        if not installed or not wanted.specifier.contains(installed, prereleases=True):
            found.append(f"{wanted.name}{wanted.specifier} (here {installed or 'none'})")
    return found or ["nothing that is otherwise here"]


@pytest.fixture(scope="module")
def roll(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of this module's own, for ROLL's classes, in a directory of its own: ROLL logs into ./output as it is imported."""
    import ray

    paths = f"{HERE.parents[1]}:{os.environ['ROLL_SOURCE']}"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with contextlib.chdir(tmp_path_factory.mktemp("roll")):
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        yield
        ray.shutdown()


pytest_collect_file = stand_in(__file__, "" if HAS_GEM else "gem and Ray", "make test-roll")
