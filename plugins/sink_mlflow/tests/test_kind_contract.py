"""The sink keeps the contract of its kind."""

from __future__ import annotations

from pathlib import Path

from atropos_testing import sink_contract


def test_contract(tmp_path: Path) -> None:
    sink_contract("mlflow", options={"tracking_uri": f"file:{tmp_path}/mlruns"})()
