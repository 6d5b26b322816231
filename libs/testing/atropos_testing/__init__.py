"""The contract of each kind of component, as tests that a plugin author calls from two lines:

    from atropos_testing import environment_contract

    test_contract = environment_contract("hello")

The component is named as for `--env` and `--reward`, or given as a Provider, a class, or a function that makes one.
`atropos check NAME` prints the same findings as a table. Scripted policies run environments; no model is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atropos_testing.contracts import KINDS as KINDS
    from atropos_testing.contracts import adapter_contract as adapter_contract
    from atropos_testing.contracts import bridge_contract as bridge_contract
    from atropos_testing.contracts import check as check
    from atropos_testing.contracts import curriculum_contract as curriculum_contract
    from atropos_testing.contracts import engine_contract as engine_contract
    from atropos_testing.contracts import environment_contract as environment_contract
    from atropos_testing.contracts import launcher_contract as launcher_contract
    from atropos_testing.contracts import loss_contract as loss_contract
    from atropos_testing.contracts import reward_contract as reward_contract
    from atropos_testing.contracts import sandbox_contract as sandbox_contract
    from atropos_testing.contracts import sink_contract as sink_contract
    from atropos_testing.contracts import teacher_contract as teacher_contract
    from atropos_testing.contracts import trainer_contract as trainer_contract
    from atropos_testing.contracts import transform_contract as transform_contract
    from atropos_testing.report import ContractBroken as ContractBroken

_CONTRACTS = (
    "KINDS",
    "adapter_contract",
    "bridge_contract",
    "check",
    "curriculum_contract",
    "engine_contract",
    "environment_contract",
    "launcher_contract",
    "loss_contract",
    "reward_contract",
    "sandbox_contract",
    "sink_contract",
    "teacher_contract",
    "trainer_contract",
    "transform_contract",
)


def __getattr__(name: str) -> object:
    """Import a contract on first use: `atropos --help` imports this package for its commands."""
    if name == "ContractBroken":
        return import_module("atropos_testing.report").ContractBroken
    if name not in _CONTRACTS:
        raise AttributeError(f"module 'atropos_testing' has no attribute {name!r}")
    return getattr(import_module("atropos_testing.contracts"), name)
