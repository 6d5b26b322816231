"""New weights from a directory replace exactly the same tensors in place, or raise a named error and change nothing."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atropos_core.errors import AtroposError, WeightsMismatch
from atropos_core.types import Sampling, tokens
from atropos_engine_hf.scoring import score

PROMPT = tokens([5, 9, 33])


def fingerprint_of(model: Any) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in model.parameters()]


def changed(source: Path, target: Path, change: Any) -> Path:
    """Copy a model directory with its tensors changed."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    save_file(change(weights), target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
async def test_weights_are_taken_up_in_place_and_ties_stay(
    open_engine: Any, make_model: Any, tmp_path: Path, tied: bool, shard_size: str
) -> None:
    engine = await open_engine(make_model(tmp_path / "old", tie_word_embeddings=tied))
    other = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "new", seed=1, tie_word_embeddings=tied))
    other.save_pretrained(tmp_path / "shards", max_shard_size=shard_size)
    assert (tmp_path / "shards/model.safetensors.index.json").exists() == (shard_size == "20KB")
    addresses = [parameter.data_ptr() for parameter in engine.model.parameters()]
    async with engine.paused(3):
        await engine.load_weights(tmp_path / "shards")
    assert [parameter.data_ptr() for parameter in engine.model.parameters()] == addresses
    assert (engine.model.lm_head.weight is engine.model.model.embed_tokens.weight) == tied
    (completion,) = await engine.sample(PROMPT, 1, Sampling(20), [0], 30)
    assert set(completion.policy_version.tolist()) == {3}
    expected = score(other, [np.concatenate([PROMPT, completion.tokens])], 1.0)[0][len(PROMPT) :]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
async def test_experts_that_are_stored_one_by_one_are_taken_up_or_refused_by_name(
    open_engine: Any, make_model: Any, tmp_path: Path, shard_size: str
) -> None:
    engine = await open_engine(make_model(tmp_path / "old", "qwen3_moe"))
    new = make_model(tmp_path / "new", "qwen3_moe", seed=1)
    other = AutoModelForCausalLM.from_pretrained(new)
    other.save_pretrained(tmp_path / "shards", max_shard_size=shard_size)
    async with engine.paused(1):
        await engine.load_weights(tmp_path / "shards")
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), other.parameters(), strict=True))
    await engine.pause()
    wrong = {
        "without": lambda all: {name: one for name, one in all.items() if "layers.1.mlp.experts.2.up" not in name},
        "narrow": lambda all: {name: one[:8] if "experts.3.down" in name else one for name, one in all.items()},
    }
    for name, change in wrong.items():
        with pytest.raises(WeightsMismatch, match=r"experts\.(gate_up_proj|down_proj)|cannot read weights"):
            await engine.load_weights(changed(new, tmp_path / name, change))
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), other.parameters(), strict=True))


def transposed(weights: Any) -> Any:
    name = "model.layers.0.mlp.up_proj.weight"
    return weights | {name: weights[name].t().contiguous()}


def without_one(weights: Any) -> Any:
    return {name: value for name, value in weights.items() if "layers.1.self_attn.q_norm" not in name}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (transposed, r"'model.layers.0.mlp.up_proj.weight' is torch.float32 \[32, 48\]"),
        (without_one, "the engine's model has 'model.layers.1.self_attn.q_norm.weight'"),
        (lambda weights: weights | {"model.extra": torch.zeros(2)}, "has 'model.extra', and the engine's model has no"),
        (lambda weights: {name: value.bfloat16() for name, value in weights.items()}, "is torch.bfloat16"),
    ],
)
async def test_other_tensors_are_refused_before_any_is_touched(
    engine: Any, tiny: Path, tmp_path: Path, change: Any, match: str
) -> None:
    before = fingerprint_of(engine.model)
    await engine.pause()
    with pytest.raises(WeightsMismatch, match=match):
        await engine.load_weights(changed(tiny, tmp_path / "other", change))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


async def test_a_cut_off_file_and_an_empty_directory_are_refused(engine: Any, tiny: Path, tmp_path: Path) -> None:
    await engine.pause()
    with pytest.raises(WeightsMismatch, match="cannot read weights"):
        await engine.load_weights(tmp_path)
    cut = changed(tiny, tmp_path / "cut", lambda weights: weights) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(WeightsMismatch, match="cannot read weights"):
        await engine.load_weights(cut.parent)


async def test_weights_are_not_loaded_beneath_what_is_being_sampled(engine: Any, tiny: Path) -> None:
    with pytest.raises(AtroposError, match="call pause"):
        await engine.load_weights(tiny)


async def test_what_is_in_flight_goes_on_with_the_loaded_weights(
    engine: Any, make_model: Any, tmp_path: Path, tiny: Path
) -> None:
    new = make_model(tmp_path / "new", seed=1)
    task = asyncio.ensure_future(engine.sample(PROMPT, 8, Sampling(100, 1.5), range(8), 60))
    while not engine._policy.batch.rows:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    async with engine.paused(1):
        await engine.load_weights(new)
    mixed = [made for made in await task if set(made.policy_version.tolist()) == {0, 1}]
    assert mixed
    models = [AutoModelForCausalLM.from_pretrained(directory).eval() for directory in (tiny, new)]
    for made in mixed:
        sequence = np.concatenate([PROMPT, made.tokens])
        old, fresh = (score(model, [sequence], 1.5)[0][len(PROMPT) :] for model in models)
        np.testing.assert_allclose(made.logprobs, np.where(made.policy_version == 0, old, fresh), atol=1e-4)
