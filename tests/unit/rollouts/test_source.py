"""Groups of rollouts in this process: how long a lease waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.config.run_file import Layer, load
from atropos_core.errors import DeadlineExceeded
from atropos_core.rollouts.source import LocalSource
from tests.unit import virtual_time
from tests.unit.parts import Words
from tests.unit.rollouts.test_runner import rollout_runner


class Slow(Words):
    """Each rollout takes 0.1 s, and there is room for so many at once."""

    def __init__(self, at_once: int | None) -> None:
        super().__init__()
        self.at_once = at_once

    async def rollout(self, task: Any, policy: Any, *, seed: int) -> Any:
        await asyncio.sleep(0.1)
        return await super().rollout(task, policy, seed=seed)


@asynccontextmanager
async def source_of(at_once: int | None) -> AsyncIterator[LocalSource]:
    training = {"group_size": 2, "groups_per_step": 4}
    run = load([Layer("test", {"environment": {"words": {"use": "words"}}, "training": training})]).config
    source = LocalSource(run, rollout_runner(Slow(at_once)), OrderedCurriculum(1, shuffled=True))
    await source.open(None)
    try:
        source.request(4)
        yield source
    finally:
        await source.stop()
        await source.close()


def test_a_lease_waits_for_as_long_as_rollouts_wait_for_room() -> None:
    async def main() -> None:
        async with source_of(1) as source:
            assert len(await source.lease(4, 0, 0.25)) == 4, "eight rollouts, one after another"

    virtual_time.run(main())


def test_a_lease_whose_rollouts_all_run_ends_at_its_deadline() -> None:
    async def main() -> None:
        async with source_of(None) as source:
            with pytest.raises(DeadlineExceeded, match=r"within 0\.05 s"):
                await source.lease(4, 0, 0.05)

    virtual_time.run(main())
