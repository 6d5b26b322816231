"""A directory of Trackio's own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trackio's directory in this test. Trackio reads TRACKIO_DIR on import, and this process may have imported it already."""
    for module in ("utils", "sqlite_storage"):
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # of processes that the test starts
    return tmp_path / "trackio"
