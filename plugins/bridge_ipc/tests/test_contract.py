"""The contract, between the real engine "hf" and the real trainer."""

from __future__ import annotations

from atropos_testing import bridge_contract

test_contract = bridge_contract("ipc", engine="hf", trainer="grpo")
