"""Samples compared with transformers' own `generate` and with plain forward passes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atropos_core.errors import DataError, DeadlineExceeded, TrainingDiverged
from atropos_core.types import Sampling, tokens

VOCABULARY, EOS = 64, 2  # of the tiny model
PROMPTS = [tokens(row) for row in ([5, 9, 33], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [3, 60, 8, 8, 12])]


def fresh_logprobs(model: Any, prompt: Any, sampled: Any, temperature: float = 1.0) -> Any:
    whole = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=whole, use_cache=False).logits[0].double() / temperature, -1)
    at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
    return table[at, whole[0, at + 1]].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_greedy_tokens_are_those_of_generate(
    open_engine: Any, make_model: Any, tmp_path: Path, kind: str
) -> None:
    engine = await open_engine(make_model(tmp_path / kind, kind))
    found = await asyncio.gather(*(engine.sample(p, 1, Sampling(20, temperature=0.0), [0], 30) for p in PROMPTS))
    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = engine.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert completion.tokens.tolist() == expected[0, len(prompt) :].tolist()
        assert completion.finish == ("stop" if completion.tokens[-1] == EOS else "length")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_a_fresh_forward_pass(engine: Any, temperature: float) -> None:
    sampling = Sampling(24, temperature=temperature)
    found = await asyncio.gather(
        *(engine.sample(p, 3, sampling, [i, i + 10, i + 20], 30) for i, p in enumerate(PROMPTS))
    )
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for completion in completions:
            expected = fresh_logprobs(engine.model, prompt, completion.tokens, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
            assert completion.policy_version.tolist() == [0] * len(completion.tokens)
            assert completion.temperature == temperature and not completion.truncated


async def test_greedy_logprobs_are_those_of_temperature_one(engine: Any) -> None:
    (completion,) = await engine.sample(PROMPTS[0], 1, Sampling(8, temperature=0.0), [0], 30)
    np.testing.assert_allclose(
        completion.logprobs, fresh_logprobs(engine.model, PROMPTS[0], completion.tokens), atol=1e-4
    )
    assert completion.temperature == 0.0


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine: Any) -> None:
    sampling = Sampling(30, temperature=1.0)
    alone = [(await engine.sample(prompt, 1, sampling, [77], 30))[0].tokens.tolist() for prompt in PROMPTS]
    crowd = [engine.sample(tokens([11, i % 50 + 3]), 2, sampling, [i, 1000 + i], 30) for i in range(60)]
    *_, found = await asyncio.gather(
        *crowd, asyncio.gather(*(engine.sample(p, 1, sampling, [77], 30) for p in PROMPTS))
    )
    assert [completions[0].tokens.tolist() for completions in found] == alone


async def test_the_same_calls_give_bit_identical_results(engine: Any) -> None:
    async def once() -> list[Any]:
        calls = [engine.sample(prompt, 5, Sampling(30), range(5), 30) for prompt in PROMPTS]
        return [(c.tokens.tobytes(), c.logprobs.tobytes()) for made in await asyncio.gather(*calls) for c in made]

    assert await once() == await once()


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 9, "top_p": 0.7}])
async def test_cut_distributions_are_renormalised_over_what_is_kept(engine: Any, cut: dict[str, Any]) -> None:
    prompt, temperature = PROMPTS[0], 2.5
    made = await engine.sample(prompt, 64, Sampling(1, temperature=temperature, **cut), range(64), 30)
    with torch.no_grad():
        logits = engine.model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].double()
    p = torch.softmax(logits / temperature, -1)
    ordered, order = p.sort(descending=True)
    ordered, order = ordered[: cut.get("top_k", VOCABULARY)], order[: cut.get("top_k", VOCABULARY)]
    before = (ordered.cumsum(0) - ordered) / ordered.sum()
    kept = {
        int(token): float(value)
        for token, value, b in zip(order, ordered, before, strict=True)
        if b < cut.get("top_p", 2)
    }
    for completion in made:
        token = int(completion.tokens[0])
        assert completion.truncated and token in kept
        assert completion.logprobs[0] == pytest.approx(np.log(kept[token] / sum(kept.values())), abs=1e-4)
        assert completion.kept is not None and completion.kept.sizes.tolist() == [len(kept)]
        assert completion.kept.token_ids.tolist() == sorted(kept)
    assert 1 < len({int(completion.tokens[0]) for completion in made}) <= len(kept)


async def test_kept_tokens_of_a_reply_are_those_of_each_of_its_positions(engine: Any) -> None:
    """Also for rows that begin and end next to others; over the kept tokens, the model's probabilities give the logprob."""
    calls = [
        engine.sample(prompt, 3, Sampling(12 + 5 * at, top_p=0.8, min_p=0.02), range(3), 30)
        for at, prompt in enumerate(PROMPTS)
    ]
    plain = engine.sample(PROMPTS[0], 2, Sampling(20), range(2), 30)
    *made, whole = await asyncio.gather(*calls, plain)
    assert all(one.kept is None and not one.truncated for one in whole)
    for prompt, completions in zip(PROMPTS, made, strict=True):
        for one in completions:
            ids = torch.from_numpy(np.concatenate([prompt, one.tokens]).astype(np.int64))[None]
            with torch.no_grad():
                logits = engine.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double()
            parts = np.split(one.kept.token_ids, np.cumsum(one.kept.sizes)[:-1])
            assert len(parts) == len(one.tokens)
            for row, kept, token, logprob in zip(logits, parts, one.tokens, one.logprobs, strict=True):
                assert token in kept
                own = row[int(token)] - row[torch.from_numpy(kept.astype(np.int64))].logsumexp(0)
                assert float(own) == pytest.approx(float(logprob), abs=1e-4)


async def test_a_greedy_call_cuts_nothing(engine: Any) -> None:
    [one] = await engine.sample(PROMPTS[0], 1, Sampling(6, temperature=0.0, top_p=0.5), [0], 30)
    [plain] = await engine.sample(PROMPTS[0], 1, Sampling(6, temperature=0.0), [0], 30)
    assert one.kept is None and not one.truncated
    assert one.logprobs.tolist() == plain.logprobs.tolist()


async def test_rescoring_agrees_with_sampling(engine: Any) -> None:
    made = [(p, c) for p in PROMPTS for c in await engine.sample(p, 4, Sampling(20), range(4), 30)]
    scored = await engine.logprobs([np.concatenate([p, c.tokens]) for p, c in made])
    for (prompt, completion), row in zip(made, scored, strict=True):
        assert row.dtype == np.float32 and row[0] == 0.0 and len(row) == len(prompt) + len(completion.tokens)
        np.testing.assert_allclose(row[len(prompt) :], completion.logprobs, atol=1e-4)


async def test_rescoring_in_segments_agrees_with_one_pass(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from atropos_engine_hf import scoring

    sequences = [np.concatenate(PROMPTS), PROMPTS[2], PROMPTS[1], tokens([])]
    whole = await engine.logprobs(sequences, 0.7)
    monkeypatch.setattr(scoring, "_LOGITS", 4 * VOCABULARY * 3)
    for one, other in zip(whole, await engine.logprobs(sequences, 0.7), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


async def test_more_rows_than_slots_all_get_their_turn(open_engine: Any, tiny: Path) -> None:
    small, large = await open_engine(tiny, max_batch=5, prefill_tokens=16), await open_engine(tiny)
    found = []
    for engine in (small, large):
        calls = [engine.sample(prompt, 7, Sampling(12), range(7), 30) for prompt in PROMPTS]
        found.append([c.tokens.tolist() for made in await asyncio.gather(*calls) for c in made])
    assert found[0] == found[1]


async def test_memory_of_keys_and_values_stays_within_its_bound(open_engine: Any, tiny: Path) -> None:
    # 2 layers x (keys + values) x 2 heads x 8 wide x 4 bytes = 256 bytes a token; 18 slots of 64 columns: 294,912.
    engine = await open_engine(tiny, kv_cache_gb=300_000 / 1e9)
    calls = [engine.sample(prompt, 15, Sampling(40), range(15), 30) for prompt in PROMPTS]
    calls += [engine.sample(tokens([5, 6]), 15, Sampling(100, 1.5), range(15), 30)]
    waiting = asyncio.gather(*calls)
    most = 0
    while not waiting.done():
        await asyncio.sleep(0)
        place = engine._policy.batch._decoder.cache.place
        most = max(most, place.slots * place.columns * 256)
    assert 250_000 < most <= 300_000
    assert all(len(made) == 15 for made in await waiting)
    with pytest.raises(DataError, match="need more than kv_cache_gb"):
        await (await open_engine(tiny, kv_cache_gb=20_000 / 1e9)).sample(PROMPTS[0], 1, Sampling(100), [0], 30)


async def test_newcomers_join_the_running_batch(engine: Any) -> None:
    first = asyncio.ensure_future(engine.sample(PROMPTS[0], 2, Sampling(60), [1, 2], 30))
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(engine.sample(PROMPTS[2], 2, Sampling(60), [3, 4], 30))
    together = 0
    while not (first.done() or second.done()):
        await asyncio.sleep(0)
        together = max(together, len(engine._policy.batch.rows))
    assert together >= 3
    for prompt, made in ((PROMPTS[0], await first), (PROMPTS[2], await second)):
        for completion in made:
            np.testing.assert_allclose(
                completion.logprobs, fresh_logprobs(engine.model, prompt, completion.tokens), atol=1e-4
            )


async def test_cancelling_a_call_frees_its_rows(engine: Any) -> None:
    kept = asyncio.ensure_future(engine.sample(PROMPTS[0], 1, Sampling(100), [5], 30))
    dropped = asyncio.ensure_future(engine.sample(PROMPTS[2], 4, Sampling(100), range(4), 30))
    while len(engine._policy.batch.rows) < 3:
        await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert len(engine._policy.batch.rows) <= 1
    (completion,) = await kept
    (again,) = await engine.sample(PROMPTS[0], 1, Sampling(100), [5], 30)
    assert completion.tokens.tolist() == again.tokens.tolist() and not engine._policy.batch.rows


async def test_a_deadline_ends_the_wait_and_frees_the_rows(engine: Any) -> None:
    await engine.pause()
    with pytest.raises(DeadlineExceeded, match="sampled 0 of 2 .* paused"):
        await engine.sample(PROMPTS[0], 2, Sampling(20), [0, 1], 0.05)
    await engine.resume(1)
    assert not engine._policy.waiting and not engine._policy.batch.rows


async def test_impossible_calls_are_refused_with_numbers(engine: Any) -> None:
    with pytest.raises(DataError, match="prompt of 11 tokens and max_tokens = 120 make 131, and the model has 128"):
        await engine.sample(PROMPTS[2], 1, Sampling(120), [0], 30)
    with pytest.raises(DataError, match="no tokens"):
        await engine.sample(tokens([]), 1, Sampling(4), [0], 30)
    with pytest.raises(DataError, match="vocabulary of 64"):
        await engine.sample(tokens([3, 64]), 1, Sampling(4), [0], 30)
    with pytest.raises(DataError, match="3 continuations were requested with 2 seeds"):
        await engine.sample(PROMPTS[0], 3, Sampling(4), [0, 1], 30)
    with pytest.raises(DataError, match="sampling.top_p is 0.0"):
        await engine.sample(PROMPTS[0], 1, Sampling(4, top_p=0.0), [0], 30)


async def test_an_error_in_a_forward_pass_reaches_every_waiting_call_and_the_engine_goes_on(engine: Any) -> None:
    head = engine.model.get_input_embeddings()
    plain = head.forward

    def out_of_memory(ids: Any) -> Any:
        raise torch.OutOfMemoryError("a planted one")

    head.forward = out_of_memory
    calls = [asyncio.ensure_future(engine.sample(prompt, 2, Sampling(4), [0, 1], 30)) for prompt in PROMPTS]
    for found in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(found, torch.OutOfMemoryError)
    head.forward = plain
    assert len(await engine.sample(PROMPTS[0], 2, Sampling(4), [0, 1], 30)) == 2


async def test_logits_that_are_not_numbers_are_an_error_and_do_not_linger(engine: Any) -> None:
    weight = engine.model.model.norm.weight
    kept = weight.data.clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match=r"not finite(.|\n)*No update has changed it yet"):
        await engine.sample(PROMPTS[0], 2, Sampling(4), [0, 1], 30)
    weight.data.copy_(kept)
    assert len(await engine.sample(PROMPTS[0], 2, Sampling(4), [0, 1], 30)) == 2


async def test_closing_ends_what_waits(open_engine: Any, tiny: Path) -> None:
    engine = await open_engine(tiny)
    await engine.pause()
    waiting = asyncio.ensure_future(engine.sample(PROMPTS[0], 1, Sampling(4), [0], 30))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    with pytest.raises(Exception, match="closed while 1 calls waited"):
        await waiting


async def test_memory_of_keys_and_values_is_given_back_before_an_update_and_taken_at_once_by_the_next_batch(
    engine: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("atropos_engine_hf.limits.KEPT", 0)
    cache = engine._policy.batch._decoder.cache

    async def sampled() -> list[Any]:
        made = await asyncio.gather(
            *(engine.sample(tokens([5, 9, 30 + i]), 8, Sampling(20), range(8), 30) for i in range(3))
        )
        return [completion for call in made for completion in call]

    first = await sampled()
    held = (cache.place.slots, cache.place.columns)
    assert held[0] >= 24 and cache.slot_layers[0].keys.numel()
    await engine.release_cache()
    assert (cache.place.slots, cache.place.columns) == (0, 0) and cache.mask.numel() == 0
    assert not any(layer.keys.numel() or layer.values.numel() for layer in cache.slot_layers)
    await engine.release_cache()  # twice is fine
    monkeypatch.setattr("atropos_engine_hf.limits.KEPT", 1 << 26)
    [alone] = await engine.sample(tokens([5, 9, 30]), 1, Sampling(20), [0], 30)
    assert (cache.place.slots, cache.place.columns) == held, "what grows is copied"
    assert np.array_equal(alone.tokens, first[0].tokens)
    for one, other in zip(first, await sampled(), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    await engine.release_cache()
    assert (cache.place.slots, cache.place.columns) == held, "so little is not worth it"


async def test_what_is_in_flight_keeps_its_keys_and_values(engine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("atropos_engine_hf.limits.KEPT", 0)
    sampling = asyncio.create_task(engine.sample(tokens([5, 9, 33]), 4, Sampling(60, temperature=0.7), range(4), 30))
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    await engine.release_cache()
    assert engine._policy.batch._decoder.cache.place.slots
    whole = await engine.sample(tokens([5, 9, 33]), 4, Sampling(60, temperature=0.7), range(4), 30)
    for one, other in zip(await sampling, whole, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
