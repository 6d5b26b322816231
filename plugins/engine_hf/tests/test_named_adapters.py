"""Samples and logprobs with a named adapter are those of peft's own model with it, whatever other adapters do at the same time."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, WeightsMismatch
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedAdapterEngine
from atropos_core.stepwise import AdapterEngine
from atropos_core.types import Sampling, tokens
from atropos_torch_models.small_model import small_model
from plugins.engine_hf.tests.test_adapter import EVERY, make_adapter

PROMPTS = [tokens([5, 9, 33]), tokens([7]), tokens(range(40, 50))]
SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"rank": 8, "targets": EVERY},
    "narrow": {"rank": 2, "targets": ["q_proj", "up_proj"], "lora_dropout": 0.5},
    "with.head/1": {"rank": 4, "targets": [*EVERY, "lm_head"]},
    "only head": {"rank": 3, "targets": ["lm_head"]},
}


def make_all(model: Path, directory: Path, shapes: Any = SHAPES) -> dict[str | None, Path]:
    made: dict[str | None, Path] = {
        name: make_adapter(model, directory / f"a{seed}", seed=seed, **shape)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return made | {None: model}


@functools.lru_cache(maxsize=8)
def pefts_model(model: Path, adapter: Path) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    if adapter != model:
        whole = PeftModel.from_pretrained(whole, adapter, autocast_adapter_dtype=False).double()
    assert {one.dtype for one in whole.parameters()} == {torch.float64}
    return whole.eval()


def oracle(model: Path, adapter: Path, sequence: Any, start: int) -> Any:
    """Return the logprobs f64[T - start, V] that predict the tokens from `start` on, by peft's own model in float64."""
    with torch.no_grad():
        ids = torch.from_numpy(np.asarray(sequence, np.int64))[None]
        logits = pefts_model(model, adapter)(input_ids=ids, use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)[start - 1 : -1].numpy()


async def crowd(engine: Any, names: Sequence[str | None], new: int = 20) -> dict[Any, list[Any]]:
    """Sample with all of these adapters at once."""
    calls = {
        (name, at): engine.sample_with(name, prompt, 3, Sampling(new), range(3), 60)
        for at, prompt in enumerate(PROMPTS)
        for name in names
    }
    return dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))


async def check(engine: Any, model: Path, adapters: dict[str | None, Path], atol: float) -> None:
    for name, adapter in adapters.items():
        if name is not None:
            await engine.add_adapter(adapter, name)
    base = (await engine.logprobs([PROMPTS[2]]))[0]
    for (name, at), made in (await crowd(engine, list(adapters))).items():
        prompt = PROMPTS[at]
        sequences = [np.concatenate([prompt, one.tokens]) for one in made]
        scored = await engine.logprobs_with(name, sequences, 1.0)
        likeliest = await engine.top_logprobs_with(name, sequences, 2, 1.0)
        for one, sequence, own, best in zip(made, sequences, scored, likeliest, strict=True):
            expected = oracle(model, adapters[name], sequence, len(prompt))
            chosen = np.take_along_axis(expected, one.tokens[:, None].astype(np.int64), 1)[:, 0]
            np.testing.assert_allclose(one.logprobs, chosen, atol=atol)
            np.testing.assert_allclose(own[len(prompt) :], chosen, atol=atol)
            np.testing.assert_allclose(best.logprobs[-2:], np.sort(expected[-1])[:-3:-1], atol=atol)
        if name is not None:
            assert np.abs((await engine.logprobs_with(name, [PROMPTS[2]], 1.0))[0] - base).max() > 1e-2
    np.testing.assert_array_equal((await engine.logprobs_with(None, [PROMPTS[2]], 1.0))[0], base)
    np.testing.assert_array_equal((await engine.logprobs([PROMPTS[2]]))[0], base)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True)])
async def test_samples_and_scores_with_each_adapter_are_those_of_pefts_model_in_float64(
    open_engine: Any, make_model: Any, tmp_path: Path, kind: str, tied: bool
) -> None:
    model = make_model(tmp_path / "model", kind, tie_word_embeddings=tied)
    await check(await open_engine(model), model, make_all(model, tmp_path), 3e-5)


@pytest.fixture(scope="module", params=["lfm2", "mamba2"])
def stateful(request: Any, tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Any) -> Path:
    """A model whose rows are decoded in caches of its own."""
    changes: dict[str, Any] = {
        "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    }
    directory = tmp_path_factory.mktemp(request.param)
    model = small_model(AutoConfig.for_model(request.param, **changes.get(request.param, {})))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


STATEFUL = {"one": {"rank": 6, "targets": ["in_proj"]}, "two": {"rank": 2, "targets": ["in_proj", "lm_head"]}}


async def test_models_that_keep_a_state_sample_with_adapters_as_peft_computes(
    open_engine: Any, stateful: Path, tmp_path: Path
) -> None:
    await check(await open_engine(stateful), stateful, make_all(stateful, tmp_path, STATEFUL), 1e-4)


async def test_an_adapter_samples_the_same_bits_alone_and_beside_others(
    open_engine: Any, tiny: Path, stateful: Path, tmp_path: Path
) -> None:
    for model, shapes in ((tiny, SHAPES), (stateful, STATEFUL)):
        adapters = make_all(model, tmp_path / model.name, shapes)
        engine = await open_engine(model)
        first, *others = [name for name in adapters if name is not None]
        await engine.add_adapter(adapters[first], first)
        alone = await crowd(engine, [first], 30)
        for name in others:
            await engine.add_adapter(adapters[name], name)
        policy = engine.sample(PROMPTS[0], 5, Sampling(40), range(5), 60)
        beside, _ = await asyncio.gather(crowd(engine, [*others, first, None], 30), policy)
        for at in range(len(PROMPTS)):
            for one, other in zip(alone[first, at], beside[first, at], strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_array_equal(one.logprobs, other.logprobs)


async def test_adapters_come_and_go_while_others_sample(engine: Any, tiny: Path, tmp_path: Path) -> None:
    adapters = make_all(tiny, tmp_path)
    await engine.add_adapter(adapters["wide"], "wide")
    alone = await engine.sample_with("wide", PROMPTS[0], 4, Sampling(60), range(4), 60)
    running = asyncio.ensure_future(engine.sample_with("wide", PROMPTS[0], 4, Sampling(60), range(4), 60))
    while not engine._named["wide"].batch.rows:
        await asyncio.sleep(0)
    await engine.add_adapter(adapters["narrow"], "narrow")
    shutil.rmtree(adapters["narrow"])  # it was read as a whole
    await engine.sample_with("narrow", PROMPTS[1], 2, Sampling(4), range(2), 60)
    removing = asyncio.ensure_future(engine.remove_adapter("wide"))
    await asyncio.sleep(0)
    await engine.remove_adapter("narrow")
    assert not removing.done() and not running.done()
    with pytest.raises(DataError, match="is removing the adapter 'wide'"):
        await engine.sample_with("wide", PROMPTS[0], 1, Sampling(2), [0], 10)
    for one, other in zip(alone, await running, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    await removing
    plain = [type(module).__module__ for module in engine.model.modules()]
    assert not any(module.startswith("peft") for module in plain)
    await engine.add_adapter(adapters["with.head/1"], "wide")  # the name is free again


async def test_an_unknown_name_a_name_that_is_taken_and_no_name_are_data_errors(
    engine: Any, tiny: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tiny, tmp_path / "a", seed=1)
    await engine.add_adapter(adapter, "a")
    calls = (
        engine.sample_with("b", PROMPTS[0], 1, Sampling(2), [0], 10),
        engine.logprobs_with("b", PROMPTS, 1.0),
        engine.top_logprobs_with("b", PROMPTS, 2, 1.0),
        engine.remove_adapter("b"),
    )
    for call in calls:
        with pytest.raises(DataError, match=r"no adapter 'b'. Its adapters: 'a'"):
            await call
    with pytest.raises(DataError, match="already has an adapter 'a'"):
        await engine.add_adapter(adapter, "a")
    with pytest.raises(DataError, match="needs a name"):
        await engine.add_adapter(adapter, "")
    with pytest.raises(DeadlineExceeded, match="has sampled 0 of 1"):
        await engine.sample_with("a", PROMPTS[0], 1, Sampling(100), [0], 0.0)


async def test_an_adapter_that_does_not_fit_is_refused_and_the_others_go_on(
    engine: Any, tiny: Path, make_model: Any, tmp_path: Path
) -> None:
    adapters = make_all(tiny, tmp_path)
    await engine.add_adapter(adapters["wide"], "wide")
    [before] = await engine.logprobs_with("wide", PROMPTS[:1], 1.0)
    other = make_adapter(make_model(tmp_path / "wide", hidden_size=64), tmp_path / "other", seed=1)
    with pytest.raises(DataError, match=r"adapter tensor .* is torch.float32 \[64, 4\]"):
        await engine.add_adapter(other, "other")
    with pytest.raises(DataError, match="cannot read an adapter"):
        await engine.add_adapter(tmp_path / "nowhere", "other")
    foreign = make_adapter(tiny, tmp_path / "foreign", seed=2)
    config = (foreign / "adapter_config.json").read_text().replace('"q_proj"', '"no_such_layer"')
    (foreign / "adapter_config.json").write_text(config)
    weights = load_file(foreign / "adapter_model.safetensors")
    save_file(
        {name: one for name, one in weights.items() if "q_proj" not in name}, foreign / "adapter_model.safetensors"
    )
    await engine.add_adapter(foreign, "foreign")  # peft leaves out what no layer is called
    with pytest.raises(DataError, match="no adapter 'other'"):
        await engine.sample_with("other", PROMPTS[0], 1, Sampling(2), [0], 10)
    [after] = await engine.logprobs_with("wide", PROMPTS[:1], 1.0)
    np.testing.assert_array_equal(before, after)


async def test_the_bytes_of_adapters_are_bounded_and_said(open_engine: Any, tiny: Path, tmp_path: Path) -> None:
    adapters = make_all(tiny, tmp_path)
    size = sum(one.nbytes for one in load_file(adapters["wide"] / "adapter_model.safetensors").values())
    engine = await open_engine(tiny, adapters_gb=1.5 * size / 1e9)
    await engine.add_adapter(adapters["wide"], "first")
    said = f"'second' has {size / 1e6:,.1f} MB of weights, and engine 'hf' holds {size / 1e6:,.1f} MB"
    with pytest.raises(DataError, match=said):
        await engine.add_adapter(adapters["wide"], "second")
    await engine.remove_adapter("first")
    await engine.add_adapter(adapters["wide"], "second")


async def test_batches_of_all_adapters_share_the_memory_for_keys_and_values(
    open_engine: Any, tiny: Path, tmp_path: Path
) -> None:
    adapters = make_all(tiny, tmp_path)
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    most = 12 * 64 * token
    engine = await open_engine(tiny, kv_cache_gb=most / 1e9)
    names = [name for name in adapters if name is not None]
    for name in names:
        await engine.add_adapter(adapters[name], name)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(sum(queue.batch.size_bytes for queue in engine._queues))
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    made = await crowd(engine, [*names, None], 50)
    watching.cancel()
    assert 0.5 * most < max(seen) <= most
    assert all(len(one.tokens) == 50 or one.finish == "stop" for some in made.values() for one in some)
    assert not any(queue.batch.size_bytes for queue in engine._named.values())
    with pytest.raises(DataError, match="need more than kv_cache_gb"):
        await (await open_engine(tiny, kv_cache_gb=32 * token / 1e9)).sample_with(
            None, PROMPTS[0], 1, Sampling(90), [0], 9
        )


async def test_the_adapter_of_a_bridge_and_named_ones_are_apart(engine: Any, tiny: Path, tmp_path: Path) -> None:
    adapters = make_all(tiny, tmp_path)
    await engine.add_adapter(adapters["wide"], "wide")
    [wide] = await engine.logprobs_with("wide", PROMPTS[:1], 1.0)
    [base] = await engine.logprobs(PROMPTS[:1])
    await engine.add_adapter(adapters["only head"], "head")  # wraps one more layer while all are off
    np.testing.assert_array_equal((await engine.logprobs_with(None, PROMPTS[:1], 1.0))[0], base)
    for version, name in enumerate(("narrow", "with.head/1", "with.head/1"), 1):
        await engine.load_adapter(adapters[name], version)
        (made,) = await engine.sample(PROMPTS[0], 1, Sampling(20), [0], 30)
        expected = oracle(tiny, adapters[name], np.concatenate([PROMPTS[0], made.tokens]), len(PROMPTS[0]))
        chosen = np.take_along_axis(expected, made.tokens[:, None].astype(np.int64), 1)[:, 0]
        np.testing.assert_allclose(made.logprobs, chosen, atol=3e-5)
        np.testing.assert_array_equal((await engine.logprobs_with("wide", PROMPTS[:1], 1.0))[0], wide)
        np.testing.assert_array_equal((await engine.logprobs_with(None, PROMPTS[:1], 1.0))[0], base)
    await engine.pause()
    with pytest.raises(WeightsMismatch, match="holds adapters"):
        await engine.load_weights(tiny)


async def test_paused_requests_of_an_adapter_go_on_after_it(engine: Any, tiny: Path, tmp_path: Path) -> None:
    await engine.add_adapter(make_adapter(tiny, tmp_path / "a", seed=1), "a")
    expected = await engine.sample_with("a", PROMPTS[0], 2, Sampling(40), range(2), 60)
    call = asyncio.ensure_future(engine.sample_with("a", PROMPTS[0], 2, Sampling(40), range(2), 60))
    while not engine._named["a"].batch.rows:
        await asyncio.sleep(0)
    async with engine.paused(3):
        assert not engine._named["a"].batch.rows and len(engine._named["a"].waiting) == 2
    for one, other in zip(expected, await call, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


async def test_an_engine_that_opened_an_adapter_adds_none_over_it(
    make_model: Any, open_engine: Any, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes((model / name).read_bytes())
    engine = await open_engine(adapter)
    with pytest.raises(DataError, match="adds no adapter over it"):
        await engine.add_adapter(adapter, "again")
    await engine.close()
    with pytest.raises(AtroposError, match="is not open"):
        await engine.add_adapter(adapter, "again")


async def test_a_hosted_engine_samples_with_adapters_as_one_in_process(engine: Any, tiny: Path, tmp_path: Path) -> None:
    assert isinstance(engine, AdapterEngine)
    adapters = make_all(tiny, tmp_path)
    context = {"directory": tmp_path, "model": tiny, "transport": None, "devices": ("cpu",), "threads": 1}
    build = {"kind": "engine", "name": "hf", "options": {}, "context": context}
    hosted = HostedAdapterEngine(await Child.start("engine", build, tmp_path / "engine.log", threads=1))
    try:
        await hosted.open()
        names = ["with.head/1", "narrow"]
        for one in (engine, hosted):
            for name in names:
                await one.add_adapter(adapters[name], name)
        here, there = await crowd(engine, names), await crowd(hosted, names)
        for key, made in here.items():
            for one, other in zip(made, there[key], strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_array_equal(one.logprobs, other.logprobs)
        await hosted.remove_adapter("narrow")
        with pytest.raises(DataError, match="no adapter 'narrow'"):
            await hosted.logprobs_with("narrow", PROMPTS)
    finally:
        await hosted.close()
