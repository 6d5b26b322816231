"""The trainer keeps the contract of its kind, but for the check that is of a policy gradient."""

from __future__ import annotations

from atropos_testing import trainer_contract

test_contract = trainer_contract("es", options={"population": 2}, skip=["learns"])
