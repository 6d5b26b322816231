"""The sink keeps the contract of its kind."""

from __future__ import annotations

from pathlib import Path

from atropos_testing import sink_contract


def test_contract(projects: Path) -> None:
    sink_contract("trackio")()
