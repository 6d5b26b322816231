"""A base in 4 or 8 bits: the numbers that an engine loads, in less memory, and the same gradients of adapters as with those numbers."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.models.model_size import read
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo import lora
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.plugin import build
from atropos_trainer_grpo.quantization import FORMATS, QuantizedLinear, rounded
from atropos_trainer_grpo.quantize_command import write
from plugins.trainer_grpo.tests.test_lora import disturb

LORA = {"rank": 4, "alpha": 8.0, "learning_rate": 1e-2}
QUANTIZED = {**LORA, "quantization": "nf4"}
KINDS = list(FORMATS)
NF4 = [  # QLoRA, arXiv 2305.14314, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@pytest.fixture(scope="session")
def on_grid(model_of, tmp_path_factory, share_directory):
    made = {}

    def make(kind="qwen3", tied=True, dtype=torch.float32, form="nf4"):
        if (kind, tied, dtype, form) not in made:
            directory = tmp_path_factory.mktemp("rounded") / kind
            write(model_of(kind, tied, dtype), directory, form)
            made[kind, tied, dtype, form] = share_directory(directory)
        return made[kind, tied, dtype, form]

    return make


def nearest(weight):
    """By the definition, in float64: each block of 64 by its largest, to the nearest of the sixteen levels."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4, dtype=torch.float64)
    return (levels[(blocks[..., None] / scales[..., None] - levels).abs().argmin(-1)] * scales).reshape(weight.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_to_the_nearest_level_and_those_on_the_grid_not_at_all(dtype):
    torch.manual_seed(3)
    weight = (torch.randn(48, 64) * 0.05).to(dtype)
    once = rounded(weight)
    assert once.dtype == dtype
    torch.testing.assert_close(once.double(), nearest(weight).to(dtype).double(), rtol=1e-6, atol=0)
    assert not torch.equal(once, weight)
    assert torch.equal(rounded(once), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_8_bits_a_weight_is_the_nearest_whole_number_of_its_rows_scale_and_is_found_again(dtype):
    random = torch.Generator().manual_seed(5)
    for spread in (1.0, 0.05, 3e-3):
        weight = (torch.randn(96, 80, generator=random) * spread).to(dtype)
        weight[7] = 0
        once = rounded(weight, "int8")
        exact = weight.double().abs().amax(1, keepdim=True) / 127
        nearest = (weight.double() / exact.clamp_min(1e-300)).round() * exact
        assert ((once.double() - weight.double()).abs() <= 0.5001 * exact + once.double().abs() * 2**-8).all()
        near = (once.double() - nearest).abs() <= nearest.abs() * 2.0**-8
        assert near.float().mean() > 0.99
        assert once.dtype == dtype and not torch.equal(once, weight) and torch.equal(once[7], weight[7])
        assert torch.equal(rounded(once, "int8"), once)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_bit_for_bit_the_linear_layer_of_its_weights(dtype, kind):
    torch.manual_seed(4)
    linear = nn.Linear(64, 40).to(dtype).requires_grad_(False)
    linear.weight.data = rounded(linear.weight.data, kind)
    layer = QuantizedLinear(linear, "q_proj", "cpu", kind)
    assert torch.equal(layer.weight, linear.weight)
    inputs = [torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_() for _ in "ab"]
    outputs = [module(one) for module, one in zip((layer, linear), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        (output.float() ** 2).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_bfloat16_that_are_trained_in_float32_are_those_of_bfloat16(on_grid, kind):
    stored = load_file(on_grid(dtype=torch.bfloat16, form=kind) / "model.safetensors")[
        "model.layers.0.mlp.up_proj.weight"
    ]
    linear = nn.Linear(stored.shape[1], stored.shape[0], bias=False).requires_grad_(False)
    linear.weight.data = stored.float()
    assert torch.equal(QuantizedLinear(linear, "up_proj", "cpu", kind).weight.float(), stored.float())
    assert not torch.equal(rounded(stored.float(), kind), stored.float()), "a finer grid would be other numbers"


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_updates_are_those_of_an_adapter_beside_the_rounded_base(
    open_trainer, make_batch, gate, on_grid, kind, checkpointing, form
):
    more = {"gradient_checkpointing": checkpointing}
    quantized = {**LORA, "quantization": form}
    held, whole = [await open_trainer(on_grid(kind, form=form), lora=one, **more) for one in (quantized, LORA)]
    for trainer in (held, whole):
        disturb(trainer.model)
    batch = make_batch()
    found, expected = [await trainer.step(batch, gate) for trainer in (held, whole)]
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    for name, tensor in lora.tensors(whole.model).items():
        torch.testing.assert_close(lora.tensors(held.model)[name], tensor, atol=1e-7, rtol=1e-5, msg=name)
    sequence = np.arange(2, 20, dtype=np.int32)
    np.testing.assert_array_equal(*[(await trainer.logprobs([sequence]))[0] for trainer in (held, whole)])


@pytest.mark.parametrize("form", KINDS)
async def test_the_packed_weights_of_all_linear_layers_but_the_head_take_what_the_plan_says(
    open_trainer, on_grid, form
):
    held_so = {**LORA, "quantization": form, "targets": ["q_proj"]}
    trainer = await open_trainer(on_grid(tied=False, form=form), lora=held_so)
    layers = [module for module in trainer.model.modules() if isinstance(module, QuantizedLinear)]
    size = read(on_grid(tied=False))
    assert len(layers) == len(size.linear()) == 14
    held = sum(layer.packed.nbytes + layer.scales.nbytes for layer in layers)
    linear = sum(out * into for out, into in size.linear().values())
    assert held == size.quantized_bytes(form, 4) - 4 * (size.parameters - linear)
    assert type(trainer.model.get_base_model().lm_head) is nn.Linear
    info = await trainer.open()
    assert info.parameters == size.parameters, "of the model, whatever holds it"


@pytest.mark.parametrize("form", KINDS)
async def test_a_checkpoint_goes_on_with_the_same_bits(open_trainer, make_batch, gate, on_grid, tmp_path, form):
    quantized = {**LORA, "quantization": form}
    first = await open_trainer(on_grid(form=form), lora=quantized)
    await first.step(make_batch(1), gate)
    await first.save(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        on_grid(form=form)
    )
    again = await open_trainer(on_grid(form=form), lora=quantized)
    await again.restore(tmp_path)
    for trainer in (first, again):
        await trainer.step(replace(make_batch(2), version=2), gate)
    for name, tensor in lora.tensors(first.model).items():
        assert torch.equal(lora.tensors(again.model)[name], tensor), name


@pytest.mark.parametrize("form", KINDS)
async def test_a_base_that_is_not_on_the_grid_is_refused_with_its_layer(open_trainer, model_of, form):
    with pytest.raises(FitError, match=r"layers\.0\.self_attn\.q_proj.*is not") as error:
        await open_trainer(model_of(), lora={**LORA, "quantization": form})
    assert f"`atropos quantize MODEL DIRECTORY --format {form} --dtype float32`" in str(error.value)


def test_several_devices_and_a_missing_package_are_refused(tmp_path, model_of, monkeypatch):
    options = GrpoOptions(lora=QUANTIZED)
    context = RunContext(tmp_path, model_of(), devices=("cpu", "cpu"))
    with pytest.raises(FitError, match=r'lora.quantization = "nf4" works only on one device, and this trainer has 2'):
        build(options, context)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else object())
    with pytest.raises(FitError, match="'bitsandbytes' is not installed") as error:
        build(options, replace(context, devices=("cpu",)))
    assert "atropos-plugin-trainer-grpo[bitsandbytes]" in str(error.value)
    build(GrpoOptions(lora={**LORA, "quantization": "int8"}), replace(context, devices=("cpu",)))


def test_a_directory_is_written_whole_or_not_at_all(model_of, tmp_path):
    with pytest.raises(ConfigError, match="does not have linear layers to round"):
        write(tmp_path, tmp_path / "out")
    broken = tmp_path / "broken"
    shutil.copytree(model_of(), broken)
    whole = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(whole[:-64])
    with pytest.raises(DataError, match="could not be rounded into"):
        write(broken, tmp_path / "out")
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="does not have linear layers to round"):
        write(broken, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]
    (tmp_path / "out.unfinished").mkdir()
    (tmp_path / "out.unfinished" / "mine").touch()
    with pytest.raises(DataError, match=r"out\.unfinished cannot be created"):
        write(model_of(), tmp_path / "out")
    assert (tmp_path / "out.unfinished" / "mine").exists(), "what we have not made is not ours to take away"


def test_shards_keep_their_names_dtypes_and_metadata_and_what_is_not_linear_its_bits(model_of, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_of(tied=False), model)
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    (model / "model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        held = {name: tensors[name] for name in part}
        save_file(held, model / f"model-{number:05}-of-00002.safetensors", metadata={"format": "pt"})
    shutil.copy(model / "config.json", model / "other.json")
    layers, weights = write(model, tmp_path / "out")
    linear = read(model).linear()
    assert layers == len(linear)
    assert weights == sum(out * into for out, into in linear.values())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in model.iterdir()}
    found = {}
    for number in (1, 2):
        found |= load_file(tmp_path / "out" / f"model-{number:05}-of-00002.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], rounded(tensor) if name in linear else tensor), name
