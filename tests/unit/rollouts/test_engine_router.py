"""Several engines as one."""

from __future__ import annotations

import asyncio

import numpy as np

from atropos_core.rollouts.engine_router import MORE_ALLOWED, EngineRouter
from atropos_core.types import Sampling, tokens
from tests.unit.parts import SayingEngine

PROMPTS = [tokens([n, n + 1]) for n in range(40)]


class Slow(SayingEngine):
    """Counts its calls, and answers once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, ...]] = []
        self.let = asyncio.Event()

    async def sample(self, prompt, n, sampling, seeds, deadline_s):
        self.requests.append(tuple(prompt.tolist()))
        await self.let.wait()
        return []


async def requests_of(fleet: EngineRouter, prompts) -> list[asyncio.Task]:
    made = [asyncio.create_task(fleet.sample(prompt, 1, Sampling(), [0], 1.0)) for prompt in prompts]
    await asyncio.sleep(0)
    return made


async def finish(fleet: EngineRouter, waiting) -> None:
    for engine in fleet.engines:
        engine.let.set()
    await asyncio.gather(*waiting)


async def test_a_prompt_goes_to_the_same_engine_each_time_and_prompts_to_all_of_them():
    fleet = EngineRouter([Slow(), Slow(), Slow()], deterministic=True)
    await finish(fleet, await requests_of(fleet, PROMPTS * 2))
    for engine in fleet.engines:
        assert len(engine.requests) >= 10
        assert all(engine.requests.count(prompt) == 2 for prompt in engine.requests)


async def test_an_engine_that_is_far_behind_is_spared():
    fleet = EngineRouter([Slow(), Slow()], deterministic=False)
    waiting = await requests_of(fleet, [PROMPTS[0]] * 40)
    requests = sorted(len(engine.requests) for engine in fleet.engines)
    assert sum(requests) == 40
    assert requests[1] - requests[0] <= MORE_ALLOWED + 1
    await finish(fleet, waiting)
    assert fleet._in_flight == [0, 0]


async def test_a_deterministic_fleet_goes_by_the_prompt_alone():
    fleet = EngineRouter([Slow(), Slow()], deterministic=True)
    waiting = await requests_of(fleet, [PROMPTS[0]] * 40)
    assert sorted(len(engine.requests) for engine in fleet.engines) == [0, 40]
    await finish(fleet, waiting)


async def test_the_prompt_decides_by_its_ids_and_not_by_their_dtype():
    fleet = EngineRouter([Slow(), Slow(), Slow()], deterministic=True)
    await finish(fleet, await requests_of(fleet, [PROMPTS[3], PROMPTS[3].astype(np.int64)]))
    assert sorted(len(engine.requests) for engine in fleet.engines) == [0, 0, 2]
