"""These tests need gem, in an environment of its own; those in an actor Ray, those with ROLL's classes a checkout."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_GEM = importlib.util.find_spec("gem") is not None

if source := os.environ.get("ROLL_SOURCE"):
    sys.path.insert(0, source)
if not HAS_GEM:
    collect_ignore_glob = ["test_*.py"]  # they import gem; the one that stands for them says why they are left out


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not HAS_GEM and file_path.parent == HERE and file_path.name == "conftest.py":
        return LeftOut.from_parent(parent, path=file_path)
    return None


class LeftOut(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return [NeedsGem.from_parent(self, name="needs_gem")]


class NeedsGem(pytest.Item):
    def runtest(self) -> None:
        pytest.skip("tests/roll needs gem and Ray in an environment of its own: `make test-roll`")
