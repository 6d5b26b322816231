"""The sink keeps the contract of its kind."""

from __future__ import annotations

from atropos_testing import sink_contract

test_contract = sink_contract("tensorboard")
