"""Tests that need an environment of their own: elsewhere one that is skipped stands for them, and says where they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

NONE_OF_THEM = ["test_*.py"]  # what a conftest leaves out of collection then


def stand_in(conftest: str, missing: str, target: str) -> Callable[[Path, pytest.Collector], pytest.Collector | None]:
    """`pytest_collect_file` of the folder of `conftest`. `missing`: what is not installed here; empty: nothing stands in."""
    here = Path(conftest)
    reason = f"tests/{here.parent.name} needs {missing} in an environment of its own: `{target}`"

    def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if not missing or file_path != here:
            return None
        made: _File = _File.from_parent(parent, path=file_path)
        made.reason = reason
        return made

    return pytest_collect_file


class _File(pytest.File):
    reason: str

    def collect(self) -> list[pytest.Item]:
        made: _Skipped = _Skipped.from_parent(self, name="left_out")
        made.reason = self.reason
        return [made]


class _Skipped(pytest.Item):
    reason: str

    def runtest(self) -> None:
        pytest.skip(self.reason)
