"""The way from Hugging Face names to rows of fused parameters, on layers shaped as vLLM's are. (tests/vllm has the real.)"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atropos_bridge_ipc import tensors
from atropos_bridge_ipc.manifest import Tensor, place
from atropos_bridge_ipc.vllm.names import Names
from atropos_bridge_ipc.vllm.regions import CannotShare, check_shareable, regions
from atropos_core.errors import WeightsMismatch

HIDDEN = 8


class Fused(nn.Module):
    def __init__(self, sizes: list[int], bias: bool = False) -> None:
        super().__init__()
        self.output_sizes = sizes
        self.weight = nn.Parameter(torch.zeros(sum(sizes), HIDDEN))
        if bias:
            self.bias = nn.Parameter(torch.zeros(sum(sizes)))


class Qkv(Fused): ...


class Merged(Fused): ...


class Embedding(nn.Module):
    def __init__(self, rows: int, padded: int) -> None:
        super().__init__()
        self.org_vocab_size = rows
        self.weight = nn.Parameter(torch.zeros(padded, HIDDEN))


class Mapper:
    def __init__(self, stacked: dict[str, tuple[str, Any]]) -> None:
        self._stacked = stacked

    def _map_name_with_shard(self, key: str) -> tuple[str, Any] | None:
        for part, (fused, shard) in self._stacked.items():
            if part in key:
                return key.replace(part, fused), shard
        return key, None


class Layer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv_proj = Qkv([4 * heads, 2 * heads, 2 * heads], bias=True)
        self.gate_up_proj = Merged([12 + heads, 12 + heads])
        self.norm = nn.LayerNorm(HIDDEN, bias=False)


class Model(nn.Module):
    hf_to_vllm_mapper = Mapper({
        ".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1),
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(10, 16)
        self.layers = nn.ModuleList([Layer(1), Layer(2)])  # of different sizes
        self.lm_head = Embedding(10, 16)
        self.lm_head.weight = self.embed.weight


NAMES = Names(
    **{field.name: None for field in dataclasses.fields(Names)}
    | {"qkv_linear": Qkv, "merged_linear": Merged, "embedding": Embedding, "mapper": Mapper}  # type: ignore[arg-type]
)


def want(name: str, *shape: int, aliases: tuple[str, ...] = ()) -> Tensor:
    return Tensor(name, aliases, "float32", shape, (shape[1], 1) if len(shape) == 2 else (1,), 4)


def wanted() -> list[Tensor]:
    made = [want("embed.weight", 10, HIDDEN, aliases=("lm_head.weight",))]
    for number, heads in ((0, 1), (1, 2)):
        parts = {"q": 4 * heads, "k": 2 * heads, "v": 2 * heads}
        made += [want(f"layers.{number}.{part}_proj.weight", rows, HIDDEN) for part, rows in parts.items()]
        made += [want(f"layers.{number}.{part}_proj.bias", rows) for part, rows in parts.items()]
        made += [want(f"layers.{number}.{part}_proj.weight", 12 + heads, HIDDEN) for part in ("gate", "up")]
        made += [want(f"layers.{number}.norm.weight", HIDDEN)]
    return made


def mapped(model: nn.Module, of: list[Tensor], *, tied: bool = True) -> dict[str, Tensor]:
    described, _ = tensors.describe_tensors(dict(model.named_parameters(remove_duplicate=False)))
    by_name = {name: entry for entry in place(described) for name in entry.names}
    return {entry.name: entry for entry in regions(model, by_name, of, tied=tied, names=NAMES)}


def test_every_parameter_is_rows_of_the_right_one_in_every_layer_by_its_own_sizes() -> None:
    model = Model()
    described, found = tensors.describe_tensors(dict(model.named_parameters(remove_duplicate=False)))
    placed = place(described)
    flat = torch.zeros(placed[-1].offset + placed[-1].nbytes, dtype=torch.uint8)
    for number, (entry, tensor) in enumerate(zip(placed, found, strict=True)):
        tensor.data = tensors.view(flat, entry)
        tensor.data.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * number)
    made = mapped(model, wanted())
    assert set(made) == {entry.name for entry in wanted()}
    for entry in wanted():
        region = made[entry.name]
        assert (region.shape, region.stride, region.names) == (entry.shape, entry.stride, entry.names)
    last: Any = model.layers[1]
    for name, expected in {
        "layers.1.q_proj.weight": last.qkv_proj.weight[:8],
        "layers.1.k_proj.weight": last.qkv_proj.weight[8:12],
        "layers.1.v_proj.bias": last.qkv_proj.bias[12:],
        "layers.1.up_proj.weight": last.gate_up_proj.weight[14:],
        "layers.1.norm.weight": last.norm.weight,
        "embed.weight": model.embed.weight[:10],
    }.items():
        assert torch.equal(tensors.view(flat, made[name]), expected), name


def test_a_parameter_that_vllm_lacks_is_named() -> None:
    with pytest.raises(
        WeightsMismatch, match=r"trainer's model has 'layers.2.norm.weight' .* vLLM's Model has no such"
    ):
        mapped(Model(), [*wanted(), want("layers.2.norm.weight", HIDDEN)])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("layers.1.norm.weight", "'layers.1.norm.weight' .*cover 0 of 32 bytes"),
        ("layers.0.k_proj.bias", "'layers.0.qkv_proj.bias' .*cover 24 of 32 bytes"),
    ],
)
def test_a_parameter_of_vllms_that_nothing_covers_is_named(missing: str, message: str) -> None:
    with pytest.raises(WeightsMismatch, match=message):
        mapped(Model(), [entry for entry in wanted() if entry.name != missing])


def test_ties_are_vllms_own() -> None:
    apart = [want("embed.weight", 10, HIDDEN), want("lm_head.weight", 10, HIDDEN), *wanted()[1:]]
    assert mapped(Model(), apart)["embed.weight"].names == ("embed.weight", "lm_head.weight")
    untied = Model()
    untied.lm_head = Embedding(10, 16)
    made = mapped(untied, wanted(), tied=False)
    assert made["embed.weight"].aliases == made["lm_head.weight"].aliases == ()


def test_a_model_that_ties_by_having_one_name_is_taken_at_its_configs_word() -> None:
    model = Model()
    del model.lm_head
    assert mapped(model, wanted())["embed.weight"].names == ("embed.weight", "lm_head.weight")
    with pytest.raises(WeightsMismatch, match="'lm_head.weight'"):
        mapped(model, wanted(), tied=False)


def test_a_fused_layer_that_is_not_the_sum_of_its_parts_cannot_be_shared() -> None:
    model = Model()
    first: Any = model.layers[0]
    first.gate_up_proj.output_sizes = [13, 14]
    with pytest.raises(CannotShare, match="'layers.0.gate_proj.weight' is part 0 of 'layers.0.gate_up_proj.weight'"):
        mapped(model, wanted())
    first.gate_up_proj = nn.Linear(HIDDEN, 26, bias=False)
    with pytest.raises(CannotShare, match="a Linear, whose parts are unknown"):
        mapped(model, wanted())


class Plain: ...


class Packed: ...


class Rotary(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.zeros(shape), persistent=False)


class OtherRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.zeros(4), persistent=False)


def running(**changes: Any) -> Any:
    """vLLM's own configuration, as far as it is looked at."""
    values = {"world_size": 1, "lora_config": None, "quant_config": None, "use_mla": False, "is_moe": False} | changes
    inner = SimpleNamespace(**values)
    return SimpleNamespace(
        parallel_config=inner, lora_config=inner.lora_config, quant_config=inner.quant_config, model_config=inner
    )


def changed(how: str) -> nn.Module:
    model = Model()
    first: Any = model.layers[0]
    if how == "packed":
        first.qkv_proj.quant_method = Packed()
    elif how == "emptied":
        first.qkv_proj.weight.data = torch.empty(0)
    elif how == "transposed":
        first.qkv_proj.weight.data = torch.zeros(HIDDEN, 8).t()
    elif how == "meta":
        first.qkv_proj.weight = nn.Parameter(torch.zeros(8, HIDDEN, device="meta"))
    elif how == "viewed":
        first.kept = first.qkv_proj.weight.detach()[:4]
    elif how == "rotary":
        first.rotary = OtherRotary()
    elif how == "long":
        first.rotary = Rotary(2, 3, 4)
    return model


SHAREABLE = dataclasses.replace(
    NAMES, linear_base=Fused, rotary=Rotary, plain_linear_method=Plain, plain_embedding_method=Plain
)


def check(model: nn.Module, config: Any, device: str = "cpu") -> None:
    for module in model.modules():
        if isinstance(module, (Fused, Embedding)) and not hasattr(module, "quant_method"):
            module.quant_method = Plain()  # type: ignore[assignment]
    check_shareable(model, config, torch.device(device), SHAREABLE)


def test_plain_matrices_with_a_table_of_angles_can_be_shared() -> None:
    model = Model()
    model.rotary = Rotary(16, 4)
    check(model, running())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"world_size": 2}, "sharded over 2 workers"),
        ({"lora_config": object()}, "serves LoRA adapters"),
        ({"quant_config": SimpleNamespace(get_name=lambda: "fp8")}, r"quantised \(fp8\)"),
        ({"use_mla": True}, "latent attention"),
        ({"is_moe": True}, "experts are fused"),
    ],
)
def test_a_configuration_that_keeps_weights_otherwise_is_named(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(CannotShare, match=reason):
        check(Model(), running(**config))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("packed", "'layers.0.qkv_proj' keeps its weights in the layout of Packed"),
        ("emptied", "'layers.0.qkv_proj.weight' is empty"),
        ("transposed", r"'layers.0.qkv_proj.weight' is stored with stride \[1, 8\]"),
        ("meta", "'layers.0.qkv_proj.weight' is empty"),
        ("viewed", "'layers.0' keeps another view of 'layers.0.qkv_proj.weight', as 'kept'"),
        ("rotary", r"'layers.0.rotary' \(OtherRotary\) has no table"),
        ("long", r"'layers.0.rotary' \(Rotary\) has no table"),
    ],
)
def test_a_layer_that_keeps_weights_otherwise_is_named(how: str, reason: str) -> None:
    with pytest.raises(CannotShare, match=reason):
        check(changed(how), running())


def test_a_layer_on_another_device_than_the_models_is_named() -> None:
    with pytest.raises(CannotShare, match=r"'embed.weight' is on cpu and the model on cuda: it was offloaded"):
        check(Model(), running(), "cuda")
