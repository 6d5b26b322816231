"""The policy as environments see it: deadlines, seeds, and the turnstile of deterministic runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.guards.deadlines import within
from atropos_core.rollouts.engine_policy import EnginePolicy, Turnstile
from atropos_core.seeds import derive
from atropos_core.types import Completion, Sampling, tokens
from tests.unit.parts import ASSISTANT, END, TOKENIZER, USER, SayingEngine, SilentEngine, ids

PROMPT = tokens([USER, 5, ASSISTANT])


def policy(engine: SayingEngine, deadline_s: float = 10.0) -> EnginePolicy:
    return EnginePolicy(engine, TOKENIZER, Sampling(max_tokens=9), deadline_s=deadline_s)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# -- samples


async def test_the_runs_sampling_is_used_where_none_is_given():
    engine = SayingEngine()
    await policy(engine).sample(PROMPT, seed=3)
    await policy(engine).sample(PROMPT, seed=3, sampling=Sampling(temperature=0))
    assert [sampling for _, sampling, _, _ in engine.requests] == [Sampling(max_tokens=9), Sampling(temperature=0)]


class Obedient(SayingEngine):
    """Ends at the token ids that it is given, as engines do, and then at the end of `text`, which it continues."""

    def __init__(self, text: str) -> None:
        super().__init__(lambda prompt, seed: text[len(prompt) - len(PROMPT) :])

    def _completion(self, text: str, sampling: Sampling) -> Completion:
        made = super()._completion(text, sampling)
        at = [n for n, one in enumerate(made.tokens.tolist()) if one in (END, *sampling.stop_ids)]
        size = min([*(n + 1 for n in at[:1]), sampling.max_tokens])
        finish: Any = "stop" if at and at[0] < size else "length"
        kept = {name: getattr(made, name)[:size] for name in ("tokens", "logprobs", "policy_version")}
        return replace(made, **kept, finish=finish)


@pytest.mark.parametrize(
    ("stop", "max_tokens", "said", "finish"),
    [
        (("bba",), 20, "abba", "stop"),
        (("bc", "ba"), 20, "abba", "stop"),
        (("zz",), 20, "abba abc", "stop"),  # the model's own end
        (("c",), 20, "abba abc", "stop"),
        (("abc",), 6, "abba a", "length"),
        (("abc",), 8, "abba abc", "stop"),
        (("bba", "ab"), 20, "ab", "stop"),
    ],
)
async def test_a_reply_ends_with_the_token_that_completes_a_stop_text(stop, max_tokens, said, finish):
    for engine in (Obedient("abba abc"), SayingEngine(lambda prompt, seed: "abba abc"[:max_tokens])):
        engine_policy = EnginePolicy(engine, TOKENIZER, Sampling(max_tokens=max_tokens, stop=stop), deadline_s=10)
        if isinstance(engine, Obedient) is False and finish == "length":
            continue  # this engine ends every reply
        [sampled] = await engine_policy.sample(PROMPT, seed=3)
        assert TOKENIZER.decode(sampled.tokens) == said
        assert sampled.finish == finish
        assert len(sampled.tokens) == len(sampled.logprobs) == len(sampled.policy_version)
        assert all(not sampling.stop for _, sampling, _, _ in engine.requests), "engines know ids"


async def test_stop_texts_and_the_stop_ids_of_a_call_go_together():
    engine = Obedient("abba abc")
    both = Sampling(max_tokens=20, stop=("bc",), stop_ids=(ids("a")[0],))
    [sampled] = await EnginePolicy(engine, TOKENIZER, both, deadline_s=10).sample(PROMPT, seed=3)
    assert (TOKENIZER.decode(sampled.tokens), sampled.finish, len(engine.requests)) == ("a", "stop", 1)


async def test_in_a_deterministic_run_replies_that_are_continued_keep_their_turns():
    turnstile = Turnstile()
    engine = Obedient("abba abc")
    sampling = Sampling(max_tokens=20, stop=("abc",))

    async def one(place: int) -> str:
        mine = EnginePolicy(engine, TOKENIZER, sampling, deadline_s=10, turnstile=turnstile, key=(place,))
        try:
            return TOKENIZER.decode((await mine.sample(PROMPT, seed=place))[0].tokens)
        finally:
            turnstile.leave((place,))

    for place in range(3):
        turnstile.enter((place,))
    assert await asyncio.gather(*(one(place) for place in range(3))) == ["abba abc"] * 3


async def test_one_sample_has_the_seed_given_and_several_have_seeds_derived_from_it():
    engine = SayingEngine()
    await policy(engine).sample(PROMPT, seed=3)
    several = await policy(engine).sample(PROMPT, n=3, seed=3)
    assert [seeds for _, _, seeds, _ in engine.requests] == [[3], [derive(3, 0), derive(3, 1), derive(3, 2)]]
    assert len(several) == 3


async def test_a_prompt_of_no_tokens_is_refused_before_the_engine_sees_it():
    engine = SayingEngine()
    with pytest.raises(DataError, match="no tokens"):
        await policy(engine).sample(tokens([]), seed=0)
    assert engine.requests == []


@pytest.mark.parametrize(("requested", "given"), [(None, 0.2), (0.05, 0.05), (60.0, 0.2)])
async def test_a_samples_deadline_is_the_shorter_of_its_own_and_the_runs(requested, given):
    engine = SilentEngine()
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"the engine: sample\(\) gave no answer within {given:g} s"):
        await policy(engine, 0.2).sample(PROMPT, seed=0, deadline_s=requested)
    assert time.monotonic() - start < given + 20
    assert engine.requests[0][3] == given, "the engine knows it too"
    assert engine.cancelled == 1, "and does not go on for nobody"


async def test_a_deadline_of_nothing_is_not_taken_for_none():
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(30):
            await policy(SilentEngine(), 60.0).sample(PROMPT, seed=0, deadline_s=0.0)


async def test_render_starts_a_conversation_and_extends_one():
    made = policy(SayingEngine())
    message = {"role": "user", "content": "4"}
    assert (await made.render([message])).tolist() == [USER, *ids("4"), ASSISTANT]
    ended = tokens([USER, 5, ASSISTANT, 6, END])
    assert (await made.render([message], after=ended)).tolist() == [USER, *ids("4"), ASSISTANT]
    assert (await made.render([message], after=ended[:-1])).tolist() == [END, USER, *ids("4"), ASSISTANT]


# -- within


async def test_within_gives_the_result_and_passes_errors_on():
    async def gives() -> int:
        return 5

    async def raises() -> int:
        raise KeyError("mine")

    assert await within(gives(), 1, "it") == 5
    with pytest.raises(KeyError, match="mine"):
        await within(raises(), 1, "it")


async def test_within_names_what_was_late():
    with pytest.raises(DeadlineExceeded, match="the thing gave no answer within 0.05 s"):
        await within(asyncio.Event().wait(), 0.05, "the thing")


async def test_a_timeout_of_the_code_itself_is_not_called_a_missed_deadline():
    async def own() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await within(own(), 30, "the thing")


async def test_a_cancellation_that_the_code_made_itself_is_an_error_and_not_a_cancellation():
    async def own() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner

    with pytest.raises(RuntimeError, match="the thing awaited something that was cancelled"):
        await within(own(), 30, "the thing")


async def test_a_cancellation_from_outside_stays_one():
    task = asyncio.ensure_future(within(asyncio.Event().wait(), 30, "the thing"))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- the turnstile


class Walk:
    """Rollouts that wait at one turnstile, and the order in which they passed."""

    def __init__(self, *keys: tuple[int, ...]) -> None:
        self.turnstile = Turnstile()
        self.passed: list[tuple[int, ...]] = []
        for place in keys:
            self.turnstile.enter(place)

    def come(self, place: tuple[int, ...]) -> asyncio.Task[None]:
        async def walk() -> None:
            await self.turnstile.wait(place)
            self.passed.append(place)

        return asyncio.ensure_future(walk())


async def test_nobody_passes_until_every_rollout_waits_and_then_all_pass_in_their_order():
    walk = Walk((2, 0), (1, 1), (1, 0))
    walk.come((2, 0))
    walk.come((1, 1))
    await settle()
    assert walk.passed == []
    walk.come((1, 0))
    await settle()
    assert walk.passed == [(1, 0), (1, 1), (2, 0)]


async def test_keys_are_ordered_as_numbers():
    walk = Walk((10, 0), (9, 0))
    walk.come((10, 0))
    walk.come((9, 0))
    await settle()
    assert walk.passed == [(9, 0), (10, 0)]


async def test_a_rollout_that_leaves_lets_the_others_pass():
    walk = Walk((0,), (1,))
    walk.come((1,))
    await settle()
    assert walk.passed == []
    walk.turnstile.leave((0,))
    await settle()
    assert walk.passed == [(1,)]


async def test_rounds_do_not_overtake_one_another():
    walk = Walk((0,), (1,))
    walk.come((0,))
    walk.come((1,))
    await settle()
    walk.come((0,))  # its second sample
    await settle()
    assert walk.passed == [(0,), (1,)], "the other one is still in its first"
    walk.come((1,))
    await settle()
    assert walk.passed == [(0,), (1,), (0,), (1,)]


async def test_samples_that_one_rollout_asks_for_at_once_pass_together():
    walk = Walk((0,), (1,))
    walk.come((1,))
    walk.come((0,))
    walk.come((0,))
    await settle()
    assert walk.passed == [(0,), (0,), (1,)]


async def test_one_that_stops_waiting_does_not_pass_and_still_holds_the_others_back():
    walk = Walk((0,), (1,))
    impatient = walk.come((0,))
    await settle()
    impatient.cancel()
    await settle()
    walk.come((1,))
    await settle()
    assert walk.passed == [], "the first rollout goes on, and may sample again"
    walk.come((0,))
    await settle()
    assert walk.passed == [(0,), (1,)]


async def test_a_rollout_that_joins_before_the_others_passed_is_waited_for():
    walk = Walk((0,))
    walk.come((0,))
    await asyncio.sleep(0)  # it waits; the look is on its way
    walk.turnstile.enter((1,))
    await settle()
    assert walk.passed == []
    walk.turnstile.leave((1,))
    await settle()
    assert walk.passed == [(0,)]


async def test_the_engine_sees_samples_in_the_order_of_their_keys_whatever_their_order_of_arrival():
    async def order(delays: list[float]) -> list[int]:
        engine, turnstile = SayingEngine(), Turnstile()
        for place in range(len(delays)):
            turnstile.enter((place,))

        async def rollout(place: int, delay: float) -> None:
            await asyncio.sleep(delay)
            one = EnginePolicy(engine, TOKENIZER, Sampling(), deadline_s=10, turnstile=turnstile, key=(place,))
            await one.sample(PROMPT, seed=place)
            turnstile.leave((place,))

        await asyncio.gather(*(rollout(place, delay) for place, delay in enumerate(delays)))
        return [seeds[0] for _, _, seeds, _ in engine.requests]

    assert await order([0.02, 0.0, 0.01]) == [0, 1, 2]
    assert await order([0.0, 0.02, 0.01]) == [0, 1, 2]
