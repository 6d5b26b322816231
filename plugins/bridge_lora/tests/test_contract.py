"""The contract, and that its checks see what a bridge of adapters may do wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from atropos_bridge_lora.bridge import LoraBridge
from atropos_bridge_lora.config import LoraBridgeOptions
from atropos_bridge_lora.plugin import transports
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_testing import bridge_contract, check

test_contract = bridge_contract("lora", engine="hf", trainer="grpo")


class GoesOnAfterAnError(LoraBridge):
    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        yield
        self.published = await self._publish(version)


class MarksTheOldOnesAsNew(LoraBridge):
    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        async with super().writing(version):
            for engine in self._engines:
                await engine.resume(version)
            yield


@pytest.mark.long  # `tests/contract/test_component_contracts.py` plants such bugs into a bridge of the toy policy
@pytest.mark.parametrize(("bridge", "broken"), [(GoesOnAfterAnError, "failure"), (MarksTheOldOnesAsNew, "pauses")])
def test_a_planted_bug_is_found_by_the_check_that_names_it(bridge: type[LoraBridge], broken: str) -> None:
    provider = BridgeProvider(bridge.__name__, "", LoraBridgeOptions, bridge, transports=transports)
    findings = check("bridge", provider, engine="hf", trainer="grpo")
    assert {finding.subject for finding in findings if finding.ok is False} == {broken}, findings
