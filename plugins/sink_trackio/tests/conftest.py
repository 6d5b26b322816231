"""A directory of Trackio's own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Trackio keeps its projects: it reads TRACKIO_DIR when it is first imported, and this process has it imported perhaps."""
    for module in ("utils", "sqlite_storage"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # of processes that the test starts
    return tmp_path / "trackio"
