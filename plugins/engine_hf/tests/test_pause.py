"""Publishing during sampling: sampled tokens keep their version, and later ones are computed under the new weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from atropos_core.types import Sampling, tokens
from atropos_engine_hf.scoring import score

PROMPTS = [tokens([5, 9, 33]), tokens([40, 41, 42, 43, 44, 45, 46, 47])]


async def in_flight(engine: Any, sampled: int, *calls: Any) -> list[Any]:
    """Start the calls, and return once every row has sampled this many tokens."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    while (
        not engine._policy.batch.rows
        or min(engine._policy.batch._columns["length"][: len(engine._policy.batch.rows)]) < sampled + 8
    ):
        await asyncio.sleep(0)
        assert not all(task.done() for task in tasks), "everything ended before it could be interrupted"
    return tasks


def change(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


async def test_a_pause_in_mid_flight_splits_versions_and_weights(engine: Any) -> None:
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}
    tasks = await in_flight(engine, 6, *(engine.sample(p, 8, Sampling(60, 1.5), range(8), 30) for p in PROMPTS))
    await engine.pause()
    change(engine.model, 0.9)
    await asyncio.sleep(0.05)
    await engine.resume(4)
    found = [(p, c) for p, made in zip(PROMPTS, await asyncio.gather(*tasks), strict=True) for c in made]
    mixed = [(p, c) for p, c in found if set(c.policy_version.tolist()) == {0, 4}]
    assert len(mixed) >= 4
    sequences = [np.concatenate([p, c.tokens]) for p, c in mixed]
    new = [score(engine.model, [sequence], 1.5)[0] for sequence in sequences]
    engine.model.load_state_dict(before)
    old = [score(engine.model, [sequence], 1.5)[0] for sequence in sequences]
    for (prompt, completion), under_old, under_new in zip(mixed, old, new, strict=True):
        is_old = completion.policy_version == 0
        assert not np.diff(completion.policy_version).min() < 0
        expected = np.where(is_old, under_old[len(prompt) :], under_new[len(prompt) :])
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        assert np.abs(under_old - under_new).max() > 0.05  # the weights had moved: the test could have failed


async def test_without_new_weights_a_pause_changes_no_token(engine: Any) -> None:
    def call() -> Any:
        return engine.sample(PROMPTS[0], 6, Sampling(60, 1.5), range(6), 30)

    undisturbed = [completion.tokens.tolist() for completion in await call()]
    (task,) = await in_flight(engine, 6, call())
    for version in (1, 2, 3):
        await engine.pause()
        await engine.resume(version)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [completion.tokens.tolist() for completion in await task] == undisturbed


async def test_a_pause_in_a_second_block_of_uniforms_changes_no_token(
    open_engine: Any, make_model: Any, tmp_path: Any
) -> None:
    model = make_model(tmp_path / "long", max_position_embeddings=1024, eos_token_id=None)
    engine = await open_engine(model)
    engine._policy.batch._stops = np.array([-1])

    def call() -> Any:
        return engine.sample(PROMPTS[0], 2, Sampling(600, 1.5), [8, 9], 60)

    undisturbed = [completion.tokens.tolist() for completion in await call()]
    (task,) = await in_flight(engine, 300, call())
    await engine.pause()
    await engine.resume(1)
    assert [completion.tokens.tolist() for completion in await task] == undisturbed
    assert len(undisturbed[0]) == 600


async def test_nothing_is_computed_while_paused_and_calls_wait(engine: Any) -> None:
    passes = 0
    handle = engine.model.register_forward_pre_hook(lambda *_: count())

    def count() -> None:
        nonlocal passes
        passes += 1

    (task,) = await in_flight(engine, 4, engine.sample(PROMPTS[0], 4, Sampling(100, 1.5), range(4), 30))
    await engine.pause()
    so_far = passes
    late = asyncio.ensure_future(engine.sample(PROMPTS[1], 1, Sampling(4), [0], 30))
    scored = asyncio.ensure_future(engine.logprobs(PROMPTS))
    await asyncio.sleep(0.05)
    assert passes == so_far and not late.done() and not scored.done() and not task.done()
    await engine.resume(9)
    assert len(await task) == 4 and len(await scored) == 2
    assert (await late)[0].policy_version.tolist() == [9] * len((await late)[0].tokens)
    handle.remove()


async def test_a_call_and_a_pause_in_one_turn_of_the_loop_compute_nothing(engine: Any) -> None:
    passes: list[int] = []
    handle = engine.model.register_forward_pre_hook(lambda *_: passes.append(1))
    call = asyncio.ensure_future(engine.sample(PROMPTS[0], 1, Sampling(2), [0], 30))
    pause = asyncio.ensure_future(engine.pause())  # runs after the call has woken the scheduler, before the scheduler
    await asyncio.sleep(0.05)
    assert pause.done() and not passes and not call.done()
    await engine.resume(1)
    assert (await call)[0].policy_version.tolist() == [1] * len((await call)[0].tokens)
    handle.remove()


async def test_a_pause_waits_for_a_rescoring_that_has_begun(engine: Any) -> None:
    many = [tokens(range(3, 60))] * 400
    scoring = asyncio.ensure_future(engine.logprobs(many))
    await asyncio.sleep(0)
    await engine.pause()
    assert scoring.done()
    await engine.resume(1)


async def test_an_exception_inside_paused_leaves_the_engine_paused(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with engine.paused(1):
            raise ZeroDivisionError
    waiting = asyncio.ensure_future(engine.sample(PROMPTS[0], 1, Sampling(2), [0], 30))
    await asyncio.sleep(0.05)
    assert not waiting.done() and engine.version == 0
    waiting.cancel()
