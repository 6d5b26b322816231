"""Sampling with a peft adapter matches peft's own forward pass, and each token has the version that made it."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atropos_core.errors import DeadlineExceeded, FitError, WeightsMismatch
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling, tokens
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.plugin import build
from atropos_engine_hf.scoring import score

PROMPT = tokens([5, 9, 33])
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(
    model: Path, directory: Path, *, seed: int, rank: int = 4, targets: Any = EVERY, **options: Any
) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


def by_peft(model: Path, adapter: Path, sequence: Any, temperature: float = 1.0) -> Any:
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    return score(whole, [sequence], temperature)[0][len(PROMPT) :]


async def test_adapters_of_experts_are_sampled_with_as_peft_computes(
    open_engine: Any, make_model: Any, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe")
    engine = await open_engine(model)
    shape: dict[str, Any] = {
        "targets": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    for version in (1, 2):
        adapter = make_adapter(model, tmp_path / f"v{version}", seed=version, **shape)
        await engine.load_adapter(adapter, version)
        (made,) = await engine.sample(PROMPT, 1, Sampling(30), [0], 30)
        expected = by_peft(model, adapter, np.concatenate([PROMPT, made.tokens]))
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_logprobs_are_those_of_pefts_own_forward(
    open_engine: Any, make_model: Any, tmp_path: Path, kind: str
) -> None:
    model = make_model(tmp_path / "model", kind)
    engine = await open_engine(model)
    plain = (await engine.logprobs([PROMPT]))[0]
    # The second replaces the first in place. The third has another shape, and dropout, which sampling does not use.
    shapes: list[dict[str, Any]] = [{}, {}, {"rank": 2, "targets": ["q_proj", "up_proj"], "lora_dropout": 0.5}]
    for version, shape in enumerate(shapes, 1):
        adapter = make_adapter(model, tmp_path / f"v{version}", seed=version, **shape)
        await engine.load_adapter(adapter, version)
        made = await engine.sample(PROMPT, 4, Sampling(30), range(4), 30)
        for completion in made:
            assert set(completion.policy_version.tolist()) == {version}
            expected = by_peft(model, adapter, np.concatenate([PROMPT, completion.tokens]))
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert np.abs((await engine.logprobs([PROMPT]))[0] - plain).max() > 1e-3


async def test_what_is_in_flight_goes_on_with_the_new_adapter_under_its_version(
    engine: Any, tiny: Path, tmp_path: Path
) -> None:
    old = make_adapter(tiny, tmp_path / "v1", seed=1)
    new = make_adapter(tiny, tmp_path / "v2", seed=2)
    await engine.load_adapter(old, 1)
    task = asyncio.ensure_future(engine.sample(PROMPT, 8, Sampling(100, 1.5), range(8), 60))
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    await engine.load_adapter(new, 2)
    mixed = [made for made in await task if set(made.policy_version.tolist()) == {1, 2}]
    assert mixed
    for made in mixed:
        sequence = np.concatenate([PROMPT, made.tokens])
        under_old, under_new = (by_peft(tiny, adapter, sequence, 1.5) for adapter in (old, new))
        np.testing.assert_allclose(made.logprobs, np.where(made.policy_version == 1, under_old, under_new), atol=1e-4)
        assert np.abs(under_old - under_new).max() > 1e-3


async def test_the_directory_is_not_looked_at_again(engine: Any, tiny: Path, tmp_path: Path) -> None:
    import shutil

    adapter = make_adapter(tiny, tmp_path / "v1", seed=1)
    await engine.load_adapter(adapter, 1)
    [before] = await engine.logprobs([PROMPT])
    shutil.rmtree(adapter)
    [after] = await engine.logprobs([PROMPT])
    np.testing.assert_array_equal(before, after)


async def test_an_adapter_of_another_model_is_refused_and_leaves_the_engine_paused(
    engine: Any, tiny: Path, make_model: Any, tmp_path: Path
) -> None:
    other = make_adapter(make_model(tmp_path / "wide", hidden_size=64), tmp_path / "other", seed=1)
    with pytest.raises(WeightsMismatch, match=r"adapter tensor .* is torch.float32 \[64, 4\]"):
        await engine.load_adapter(other, 1)
    with pytest.raises(DeadlineExceeded):
        await engine.sample(PROMPT, 1, Sampling(2), [0], 0.1)
    await engine.resume(0)
    with pytest.raises(WeightsMismatch, match="cannot read an adapter"):
        await engine.load_adapter(tmp_path / "nowhere", 1)
    await engine.resume(0)
    adapter = make_adapter(tiny, tmp_path / "v1", seed=1)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(WeightsMismatch, match="is missing in"):
        await engine.load_adapter(adapter, 1)


async def test_a_directory_that_is_an_adapter_opens_as_its_base_model_with_it(
    make_model: Any, open_engine: Any, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes((model / name).read_bytes())
    engine = await open_engine(adapter)
    (completion,) = await engine.sample(PROMPT, 1, Sampling(20), [0], 30)
    expected = by_peft(model, adapter, np.concatenate([PROMPT, completion.tokens]))
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


def test_without_peft_an_engine_for_adapters_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    monkeypatch.setitem(sys.modules, "peft", None)
    here = Path()
    build(HFOptions(), RunContext(here, here, transport="checkpoint"))
    with pytest.raises(FitError, match="needs the module 'peft', and that is not installed") as refused:
        build(HFOptions(), RunContext(here, here, transport="adapter"))
    assert refused.value.remedy == "pip install atropos-plugin-engine-hf[lora]"
