"""Several named adapters at once in a real vLLM: samples and scores are those of transformers with peft's adapter, in float64."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from atropos_core.errors import DataError
from atropos_core.types import Sampling, tokens
from tests.vllm.hosted import Hosted, hosted, start, until_running
from tests.vllm.models import EOS, POSITIONS, VOCABULARY, make_adapter, make_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPTS = [tokens([5, 9, 33, 7, 120, 64]), tokens([7]), tokens(range(40, 50))]
LONG_S = 120.0
CLOSE = 1e-4
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"rank": 8, "targets": LINEAR},
    "narrow": {"rank": 2, "alpha": 16.0, "targets": ["q_proj", "up_proj"]},
    "with.head/1": {"rank": 4, "targets": [*LINEAR, "lm_head"]},
    "only head": {"rank": 3, "targets": ["lm_head"]},
}
ROOM = {"announced": {"named_adapters": 4}, "transport": "adapter", "kv_cache_gb": 0.25}


def make_all(model: Path, directory: Path) -> dict[str | None, Path]:
    made: dict[str | None, Path] = {
        name: make_adapter(directory / f"a{seed}", model, seed=seed, **shape)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }
    return made | {None: model}


@functools.lru_cache(maxsize=16)
def pefts_model(model: Path, adapter: Path) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    if adapter != model:
        whole = PeftModel.from_pretrained(whole, str(adapter), autocast_adapter_dtype=False).double()
    assert {one.dtype for one in whole.parameters()} == {torch.float64}
    return whole.eval()


def oracle(model: Path, adapter: Path, sequence: Any) -> Any:
    """Return logprobs f64[T - 1, V]: entry i predicts token i + 1."""
    with torch.no_grad():
        ids = torch.from_numpy(np.asarray(sequence, np.int64))[None]
        return torch.log_softmax(pefts_model(model, adapter)(input_ids=ids, use_cache=False).logits[0], -1)[:-1].numpy()


async def check(engine: Any, model: Path, adapters: dict[str | None, Path]) -> float:
    """Sample and score with all adapters at once, and return the largest difference from peft's model, in nats."""
    calls = {
        (name, at): engine.sample_with(name, prompt, 3, Sampling(20), range(3), LONG_S)
        for at, prompt in enumerate(PROMPTS)
        for name in adapters
    }
    sampled = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    wholes = {
        (name, at): [np.concatenate([PROMPTS[at], one.tokens]) for one in made] for (name, at), made in sampled.items()
    }
    scored = await asyncio.gather(*(engine.logprobs_with(name, wholes[name, at]) for name, at in calls))
    best = await asyncio.gather(*(engine.top_logprobs_with(name, wholes[name, at], 2) for name, at in calls))
    gaps = []
    for (name, at), own, likeliest in zip(calls, scored, best, strict=True):
        begin = len(PROMPTS[at])
        for one, whole, score, top in zip(sampled[name, at], wholes[name, at], own, likeliest, strict=True):
            expected = oracle(model, adapters[name], whole)
            chosen = np.take_along_axis(expected, whole[1:, None].astype(np.int64), 1)[:, 0]
            gaps.append(np.abs(one.logprobs - chosen[begin - 1 :]).max())
            gaps.append(np.abs(score[1:] - chosen).max())
            gaps.append(np.abs(top.logprobs.reshape(-1, 2) - np.sort(expected)[:, :-3:-1]).max())
            assert score[0] == 0.0
            assert set(one.policy_version.tolist()) == {0} and one.finish in ("stop", "length")
            assert (one.tokens[-1] == EOS) == (one.finish == "stop")
    return float(max(gaps))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    return make_all(model, tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    model: Path, adapters: dict[str | None, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Hosted]:
    """A server with room for two adapters in a batch and five in memory, four of which are loaded."""
    made = await start(model, tmp_path_factory.mktemp("run"), **ROOM, max_loras=2, max_cpu_loras=5, max_lora_rank=10)
    for name, directory in adapters.items():
        if name is not None:
            await made.engine.add_adapter(directory, name)
    yield made
    await made.engine.close()


async def test_samples_and_scores_with_each_adapter_are_those_of_pefts_model(
    served: Hosted, adapters: dict[str | None, Path]
) -> None:
    """The last slot of a batch has an adapter then, so that rows of the base model are next to it."""
    worst = await check(served.engine, served.model, adapters)
    print(f"four adapters and the base model at once: {worst:.1e} nats off")
    assert worst <= CLOSE
    base = oracle(served.model, served.model, PROMPTS[0])
    for name, directory in adapters.items():
        if name is not None:
            assert np.abs(oracle(served.model, directory, PROMPTS[0]) - base).max() > 0.1, "it must do something"


async def test_an_adapter_stays_as_it_was_added_while_others_come_and_go(
    served: Hosted, adapters: dict[str | None, Path], tmp_path: Path
) -> None:
    """More come than there is memory for at once, and each directory is gone once it was read."""
    engine = served.engine

    async def sampled() -> list[Any]:
        return list(await engine.sample_with("wide", PROMPTS[0], 4, Sampling(40), range(4), LONG_S))

    before = await sampled()
    in_flight = asyncio.ensure_future(engine.sample_with("wide", PROMPTS[0], 8, Sampling(450, 0.3), range(8), LONG_S))
    await until_running(served, in_flight)
    for seed in range(3):
        directory = make_adapter(tmp_path / f"new{seed}", served.model, seed=20 + seed)
        await engine.add_adapter(directory, "new")
        kept = shutil.copytree(directory, tmp_path / f"kept{seed}")
        shutil.rmtree(directory)
        [one] = await engine.sample_with("new", PROMPTS[1], 1, Sampling(20), [seed], LONG_S)
        whole = np.concatenate([PROMPTS[1], one.tokens])
        chosen = np.take_along_axis(oracle(served.model, kept, whole), whole[1:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(one.logprobs, chosen[len(PROMPTS[1]) - 1 :], atol=CLOSE)
        await engine.remove_adapter("new")
        with pytest.raises(DataError, match="no adapter 'new'"):
            await engine.sample_with("new", PROMPTS[1], 1, Sampling(2), [0], LONG_S)
    for one, other in zip(before, await sampled(), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=CLOSE)
    await in_flight


async def test_an_adapter_is_removed_once_its_requests_have_ended(
    served: Hosted, adapters: dict[str | None, Path]
) -> None:
    engine = served.engine
    await engine.add_adapter(adapters["narrow"], "leaving")
    running = asyncio.ensure_future(engine.sample_with("leaving", PROMPTS[0], 8, Sampling(450, 0.3), range(8), LONG_S))
    await until_running(served, running)
    removing = asyncio.ensure_future(engine.remove_adapter("leaving"))
    with pytest.raises(DataError, match="no adapter 'leaving'"):
        while True:  # it has no new requests from now on
            await engine.sample_with("leaving", PROMPTS[0], 1, Sampling(1), [0], LONG_S)
    assert not running.done()
    assert not removing.done()
    for one in await running:
        whole = np.concatenate([PROMPTS[0], one.tokens])
        logits = oracle(served.model, adapters["narrow"], whole)[len(PROMPTS[0]) - 1 :]
        heated = torch.log_softmax(torch.from_numpy(logits) / 0.3, -1).numpy()
        chosen = np.take_along_axis(heated, one.tokens[:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(one.logprobs, chosen, atol=CLOSE)
    await removing


async def test_stop_ids_and_seeds_act_as_without_an_adapter(served: Hosted) -> None:
    async def sampled(**changes: Any) -> Any:
        [one] = await served.engine.sample_with("with.head/1", PROMPTS[0], 1, Sampling(30, **changes), [9], LONG_S)
        return one

    whole, again = await asyncio.gather(sampled(), sampled())
    np.testing.assert_array_equal(whole.tokens, again.tokens)
    stop = int(whole.tokens[len(whole.tokens) // 2])
    cut = await sampled(stop_ids=(stop,))
    first = int((whole.tokens == stop).argmax())
    assert (cut.tokens.tolist(), cut.finish) == (whole.tokens[: first + 1].tolist(), "stop")


async def test_an_adapter_that_cannot_be_used_is_refused_with_one_error_and_its_fix(
    served: Hosted, adapters: dict[str | None, Path], tmp_path: Path
) -> None:
    engine = served.engine
    for call in (
        engine.sample_with("b", PROMPTS[0], 1, Sampling(2), [0], LONG_S),
        engine.logprobs_with("b", PROMPTS),
        engine.top_logprobs_with("b", PROMPTS, 2),
        engine.remove_adapter("b"),
    ):
        with pytest.raises(DataError, match=r"no adapter 'b'. Its adapters: 'narrow', 'only head'"):
            await call
    with pytest.raises(DataError, match="already has an adapter 'wide'"):
        await engine.add_adapter(adapters["wide"], "wide")
    with pytest.raises(DataError, match="needs a name"):
        await engine.add_adapter(adapters["wide"], "")
    with pytest.raises(DataError, match="cannot read an adapter from .*nowhere"):
        await engine.add_adapter(tmp_path / "nowhere", "other")
    with pytest.raises(DataError, match=r"rank 12, .* of rank 10 at most.\n  Raise engine.max_lora_rank"):
        await engine.add_adapter(make_adapter(tmp_path / "high", served.model, rank=12), "other")
    small = make_model(tmp_path / "small", "qwen3", intermediate_size=96)
    with pytest.raises(DataError, match=r"mlp.\w+_proj' is \[\d+, \d+\] there, and \[\d+, \d+\] in"):
        await engine.add_adapter(make_adapter(tmp_path / "foreign", small), "other")
    deep = make_model(tmp_path / "deep", "qwen3", num_hidden_layers=3)
    with pytest.raises(DataError, match=r"would leave out \d layers of this adapter, such as 'model.layers.2"):
        await engine.add_adapter(make_adapter(tmp_path / "deeper", deep), "other")
    config = make_adapter(tmp_path / "dora", served.model) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    with pytest.raises(DataError, match="does not yet support DoRA"):
        await engine.add_adapter(config.parent, "other")
    await engine.add_adapter(adapters["narrow"], "fifth")
    with pytest.raises(DataError, match=r"'sixth' has no room: .* holds 5 adapters already.\n.*max_cpu_loras"):
        await engine.add_adapter(adapters["narrow"], "sixth")
    await engine.remove_adapter("fifth")
    with pytest.raises(NotImplementedError, match="scores given tokens only at temperature 1"):
        await engine.logprobs_with("wide", PROMPTS, 0.5)
    with pytest.raises(NotImplementedError, match=f"up to {POSITIONS - 1} tokens"):
        await engine.logprobs_with("wide", [tokens([5] * POSITIONS)])
    [all_tokens] = await engine.top_logprobs_with("only head", [PROMPTS[0]], VOCABULARY + 5)
    assert len(all_tokens.token_ids) == VOCABULARY * (len(PROMPTS[0]) - 1), "no more than there are"
    assert await check(engine, served.model, adapters) <= CLOSE, "and the others are as before"


async def test_a_tied_head_is_adapted_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama3", tie_word_embeddings=True)
    adapters = make_all(model, tmp_path)
    async with hosted(model, tmp_path / "run", **ROOM, max_loras=2) as made:
        for name, directory in adapters.items():
            if name is not None:
                await made.engine.add_adapter(directory, name)
        worst = await check(made.engine, model, adapters)
        print(f"with a tied head: {worst:.1e} nats off")
        assert worst <= CLOSE


async def test_an_adapter_of_a_head_that_vllm_cannot_adapt_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    adapters = make_all(model, tmp_path)
    async with hosted(model, tmp_path / "run", **ROOM) as made:
        for name in ("with.head/1", "only head"):
            with pytest.raises(DataError, match=r"changes the head, and vLLM has no(?s:.*)train_unembed=False"):
                await made.engine.add_adapter(adapters[name], name)
        without = {name: adapters[name] for name in ("wide", "narrow", None)}
        for name, directory in without.items():
            if name is not None:
                await made.engine.add_adapter(directory, name)
        assert await check(made.engine, model, without) <= CLOSE
