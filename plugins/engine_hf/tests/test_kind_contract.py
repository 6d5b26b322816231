"""The engine keeps the contract of its kind."""

from __future__ import annotations

from atropos_testing import engine_contract

test_contract = engine_contract("hf")
