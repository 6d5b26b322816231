"""Trainer, bridge and environment keep the contracts of their kinds, but for the check that is of a policy gradient."""

from __future__ import annotations

from atropos_testing import environment_contract, trainer_contract

test_trainer = trainer_contract("gepa", options={"proposer": "first_words"}, skip=["learns"])
test_environment = environment_contract("prompted", options={"environment": "gsm8k", "prompt": "Think."})
