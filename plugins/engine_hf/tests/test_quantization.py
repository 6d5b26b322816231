"""A base model in 4 or 8 bits gives exactly the numbers of the unpacked one, with and without an adapter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file

from atropos_core.errors import FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling, tokens
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.loading import load_model
from atropos_engine_hf.nf4_linear import QuantizedLinear
from atropos_engine_hf.plugin import build, holds
from atropos_engine_hf.quantization import Int8Linear
from atropos_torch_models import int8_grid
from plugins.engine_hf.tests.test_adapter import make_adapter

PROMPT = tokens([5, 9, 33])


@pytest.fixture(params=["nf4", "int8"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def rounded(request: pytest.FixtureRequest, kind: str, make_model: Any, tmp_path: Path) -> Path:
    """Make a model whose linear layers are on the grid, in the dtype in which it is stored."""
    dtype = getattr(torch, request.param)
    directory: Path = make_model(tmp_path / "model", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if "_proj" in name:
            if kind == "nf4":
                packed, state = functional.quantize_4bit(tensor.float().contiguous(), blocksize=64, quant_type="nf4")
                tensors[name] = functional.dequantize_4bit(packed, state).to(dtype)
            else:
                tensors[name] = int8_grid.unpack(*int8_grid.pack(tensor.float())).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace('"dtype": "float32"', f'"dtype": "{request.param}"'))
    return directory


@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_weights_are_those_of_the_whole_model_bit_for_bit_and_logits_as_they_give_them(
    rounded: Path, computed: str, kind: str
) -> None:
    if computed == "bfloat16" and read(rounded).dtype == "float32":  # type: ignore[union-attr]
        pytest.skip("rounded once more, its weights would lie on no grid")
    whole, packed = (load_model(rounded, computed, "cpu", held) for held in (None, kind))
    ids = torch.randint(3, 60, (3, 17), generator=torch.Generator().manual_seed(0))
    rounding = {"atol": 1e-5, "rtol": 0.0} if computed == "float32" else {"atol": 0.1, "rtol": 0.0}
    with torch.no_grad():
        for some in (ids, ids[:1, :1]):  # the order of a sum depends on a weight's place in memory
            torch.testing.assert_close(packed(some).logits, whole(some).logits, **rounding)
    layers = {name: one for name, one in packed.named_modules() if isinstance(one, (QuantizedLinear, Int8Linear))}
    assert len(layers) == 14
    for name, layer in layers.items():
        if kind == "nf4":
            assert layer.weight.dtype == torch.uint8
            made = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        else:
            assert layer.weight.dtype == torch.int8
            made = layer.whole()
        assert torch.equal(made.to(whole.dtype), whole.get_submodule(name).weight)
    assert packed.get_output_embeddings().weight.dtype == getattr(torch, computed)


async def test_beside_an_adapter_it_samples_what_the_whole_base_samples(
    open_engine: Any, rounded: Path, tmp_path: Path, kind: str
) -> None:
    if read(rounded).dtype != "float32":  # type: ignore[union-attr]
        pytest.skip("peft adds an adapter in 16 bits where its base is in 4: equal to a rounding")
    engines = [await open_engine(rounded, quantization=held) for held in (None, kind)]
    made = []
    for engine in engines:
        said = []
        for version in (1, 2):
            await engine.load_adapter(make_adapter(rounded, tmp_path / f"v{version}", seed=version), version)
            said += await engine.sample(PROMPT, 4, Sampling(30), range(4), 30)
        made.append(said)
    for one, other in zip(*made, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-6)


async def test_the_engine_counts_the_weights_of_the_model_and_not_the_bytes(
    open_engine: Any, rounded: Path, kind: str
) -> None:
    infos = []
    for held in (None, kind):
        engine = await open_engine(rounded, quantization=held)
        infos.append(await engine.open())
    assert infos[0].parameters == infos[1].parameters and infos[0].dtype == infos[1].dtype


def test_a_model_that_is_not_on_the_grid_is_refused_by_its_first_layer(tiny: Path, kind: str) -> None:
    with pytest.raises(FitError, match=r"layers\.0\.self_attn\.q_proj is not\.") as refused:
        load_model(tiny, "auto", "cpu", kind)
    assert f"atropos quantize MODEL DIRECTORY --format {kind} --dtype float32" in str(refused.value)


def test_it_is_for_a_base_beside_adapters_and_needs_bitsandbytes(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    options = HFOptions(quantization="nf4")
    with pytest.raises(FitError, match=r"whole models \(posix_shm\)") as refused:
        build(options, RunContext(tmp_path, tiny, transport="posix_shm"))
    assert "--bridge lora" in str(refused.value)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "bitsandbytes" else find(name))
    with pytest.raises(FitError, match=r"needs the module 'bitsandbytes'") as missing:
        build(options, RunContext(tmp_path, tiny, transport="adapter"))
    assert "atropos-plugin-engine-hf[bitsandbytes]" in str(missing.value)
    build(HFOptions(quantization="int8"), RunContext(tmp_path, tiny, transport="adapter"))


def test_the_plan_counts_packed_weights_and_the_whole_model_while_it_opens(
    rounded: Path, tmp_path: Path, kind: str
) -> None:
    dtype = read(rounded).dtype  # type: ignore[union-attr]
    work = Workload(RunContext(tmp_path, rounded, transport="adapter"), 1, 1, 40, 5, prompt_tokens=20)
    planned = {one.what: one for one in holds(HFOptions(quantization=kind, dtype=dtype), work)}
    whole = {one.what: one for one in holds(HFOptions(dtype=dtype), work)}
    model = load_model(rounded, dtype, "cpu", kind)
    scales = 4 * sum(
        one.weight.quant_state.absmax.numel() for one in model.modules() if isinstance(one, QuantizedLinear)
    )
    scales += 4 * sum(one.scales.numel() for one in model.modules() if isinstance(one, Int8Linear))
    held = sum(one.numel() * one.element_size() for one in model.parameters())
    assert planned["parameters"].size_bytes == held + scales
    before = planned["model before it is packed"]
    assert (before.size_bytes, before.device, before.phase) == (whole["parameters"].size_bytes, "cpu", "opening")
