"""The trainer keeps the contract of its kind."""

from __future__ import annotations

from atropos_testing import trainer_contract

test_contract = trainer_contract("grpo")
