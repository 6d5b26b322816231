"""These tests need reasoning-gym, gem, textarena and openenv, in an environment of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MISSING = [name for name in ("reasoning_gym", "gem", "textarena", "openenv") if importlib.util.find_spec(name) is None]

if MISSING:
    collect_ignore_glob = ["test_*.py"]  # the one that stands for them says why they are left out


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if MISSING and file_path.parent == HERE and file_path.name == "conftest.py":
        return LeftOut.from_parent(parent, path=file_path)
    return None


class LeftOut(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return [NeedsWorlds.from_parent(self, name="needs_worlds")]


class NeedsWorlds(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(f"tests/worlds needs {', '.join(MISSING)} in an environment of its own: `make test-worlds`")
