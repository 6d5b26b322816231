"""The teacher keeps the contract of its kind."""

from __future__ import annotations

from atropos_testing import teacher_contract

test_contract = teacher_contract("self", options={"engine": {"use": "toy"}, "shows": ["answer"]})
