"""The adapter keeps the contract of its kind."""

from __future__ import annotations

from atropos_testing import adapter_contract

test_contract = adapter_contract("skyrl")
