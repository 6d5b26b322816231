"""Both extensions in one process: what is shared, and each planted fault by its own error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atropos_bridge_ipc.manifest import ALIGN, PAGE, Manifest
from atropos_bridge_ipc.owner_extension import OwnerExtension
from atropos_bridge_ipc.trainer_extension import TrainerExtension
from atropos_core.errors import FitError, WeightsMismatch


async def share(
    engine: Any, trainer: Any, change: Callable[[dict[str, Any]], None] = lambda offer: None
) -> tuple[Any, Any, Any]:
    ours, theirs = OwnerExtension(engine), TrainerExtension(trainer)
    reply = await ours.export("posix_shm")
    change(reply.value)
    await theirs.adopt(reply.value, reply.descriptors)
    return ours, theirs, reply.value


def changing(of: str, /, **fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(offer: dict[str, Any]) -> None:
        manifest = Manifest.decoded(offer["manifest"])
        changed = tuple(dataclasses.replace(t, **fields) if t.name == of else t for t in manifest.tensors)
        offer["manifest"] = dataclasses.replace(manifest, tensors=changed).encoded()

    return change


async def test_the_skeleton_becomes_the_engines_model(tiny: Path, holders: Any) -> None:
    engine, trainer, reference = holders.loaded(tiny), holders.skeleton(tiny), holders.loaded(tiny).model
    identities = {name: id(parameter) for name, parameter in engine.model.named_parameters()}
    await share(engine, trainer)
    assert engine.moved == trainer.moved == 1
    assert identities == {name: id(parameter) for name, parameter in engine.model.named_parameters()}
    ids = torch.arange(3, 40)[None]
    expected = reference(input_ids=ids).logits
    for model in (engine.model, trainer.model):
        assert torch.equal(model(input_ids=ids).logits, expected)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert all(parameter.data_ptr() % ALIGN == 0 for parameter in model.parameters())
    assert all(p.requires_grad for p in trainer.model.parameters())


async def test_rotary_buffers_are_what_a_fresh_model_has(tiny: Path, holders: Any) -> None:
    trainer, fresh = holders.skeleton(tiny), holders.loaded(tiny).model
    assert trainer.model.model.rotary_emb.inv_freq.is_meta
    await share(holders.loaded(tiny), trainer)
    for name, buffer in fresh.named_buffers():
        assert (
            torch.equal(trainer.model.get_buffer(name), buffer) and trainer.model.get_buffer(name).dtype == buffer.dtype
        )


async def test_an_optimiser_step_is_in_the_engine_at_once(tiny: Path, holders: Any) -> None:
    engine, trainer = holders.loaded(tiny), holders.skeleton(tiny)
    await share(engine, trainer)
    ids = torch.arange(3, 40)[None]
    before = engine.model(input_ids=ids).logits.detach().clone()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-2)
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after = engine.model(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3
    assert torch.equal(after, trainer.model(input_ids=ids).logits)


async def test_sentinels_are_read_at_the_other_end(tiny: Path, holders: Any) -> None:
    engine, trainer, _ = await share(holders.loaded(tiny), holders.skeleton(tiny))
    await engine.write_sentinel(0, 123)
    await trainer.write_sentinel(1, 456)
    assert (await trainer.read_sentinel(0), await engine.read_sentinel(1)) == (123, 456)


@pytest.mark.parametrize("tied", [True, False])
async def test_every_byte_of_the_model_is_in_the_segment_once(
    make_model: Any, tmp_path: Path, holders: Any, tied: bool
) -> None:
    directory = make_model(tmp_path / "model", tie_word_embeddings=tied)
    engine = holders.loaded(directory)
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    _, _, offer = await share(engine, holders.skeleton(directory))
    manifest = Manifest.decoded(offer["manifest"])
    assert sum(tensor.nbytes for tensor in manifest.tensors) == weights
    assert weights + PAGE <= manifest.size < weights + 2 * PAGE + ALIGN * len(manifest.tensors)
    (head,) = (tensor for tensor in manifest.tensors if "lm_head.weight" in tensor.names)
    assert len(head.names) == (2 if tied else 1)


async def test_persistent_buffers_travel_and_transposed_weights_keep_their_stride(holders: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
            self.register_buffer("count", torch.tensor(7))

    engine = holders.of(Model())
    with torch.device("meta"):
        trainer = holders.of(Model())
    await share(engine, trainer)
    assert trainer.model.weight.stride() == (1, 3) and int(trainer.model.count) == 7
    assert torch.equal(trainer.model.weight, torch.arange(6.0).reshape(2, 3).t())
    trainer.model.count += 1
    assert int(engine.model.count) == 8


async def test_every_descriptor_is_closed(tiny: Path, holders: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    engine, trainer = holders.loaded(tiny), holders.skeleton(tiny)
    extensions = await share(engine, trainer)
    # At either end, mmap keeps its own duplicate of the descriptor while the mapping lives.
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    del extensions, engine, trainer
    assert len(os.listdir("/proc/self/fd")) == before


def planted(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))


NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changing(NORM, dtype="bfloat16"), f"'{NORM}': dtype differs.*\n  trainer: float32 .*\n  engine:  bfloat16"),
        (changing(NORM, shape=(31,), nbytes=124), f"'{NORM}': shape differs"),
        (changing(GATE, stride=(1, 48)), f"'{GATE}': stride differs"),
        (changing(GATE, stride=(64, 1)), f"'{GATE}': .* without gaps"),
        (changing(NORM, name="model.other.weight"), f"trainer's model has '{NORM}' .* engine's has no such tensor"),
        (changing(NORM, aliases=("more.weight",)), "engine's model has 'more.weight' .* trainer's has no such tensor"),
        (changing(NORM, offset=1 << 40), f"'{NORM}' at bytes .* ends outside the segment"),
        (changing(NORM, offset=0), f"'{NORM}' at bytes 0 to 128 overlaps the sentinel page"),
        (changing(NORM, offset=PAGE), "overlaps '"),
        (changing(NORM, offset=PAGE + 2), "not aligned"),
        (changing(NORM, nbytes=64), f"'{NORM}': .* does not fill 64 bytes"),
        (changing(NORM, nbytes=-128), f"'{NORM}': .* does not fill -128 bytes"),
        (changing("model.embed_tokens.weight", aliases=()), "trainer's model has 'lm_head.weight'"),
        (lambda offer: offer["manifest"].update(size=offer["manifest"]["size"] * 2), "the segment has"),
        (lambda offer: offer["manifest"]["rebuilt"].update({"model.rotary_emb.inv_freq": "other"}), "buffer .*inv_freq' *.*differs"),
    ],
)  # fmt: skip
async def test_each_fault_in_a_manifest_is_named_and_nothing_is_replaced(
    tiny: Path, holders: Any, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    trainer = holders.skeleton(tiny)
    with pytest.raises(WeightsMismatch, match=message):
        await share(holders.loaded(tiny), trainer, change)
    assert all(parameter.is_meta for parameter in trainer.model.parameters()) and not trainer.moved


async def test_a_trainer_in_another_precision_is_refused(
    make_model: Any, tiny: Path, tmp_path: Path, holders: Any
) -> None:
    other = make_model(tmp_path / "half", dtype="bfloat16")
    with pytest.raises(WeightsMismatch, match="dtype differs") as found:
        await share(holders.loaded(tiny), holders.skeleton(other))
    assert found.value.remedy and "dtype" in found.value.remedy


async def test_a_trainer_that_unties_what_the_engine_ties_is_refused(tiny: Path, holders: Any) -> None:
    trainer = holders.skeleton(tiny, tie_word_embeddings=False)
    with pytest.raises(
        WeightsMismatch, match="tied otherwise: the trainer's model has .* by itself, the engine's has one parameter"
    ):
        await share(holders.loaded(tiny), trainer)


async def test_models_of_other_depth_are_refused_both_ways(
    make_model: Any, tiny: Path, tmp_path: Path, holders: Any
) -> None:
    deeper = make_model(tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(WeightsMismatch, match="the trainer's model has 'model.layers.2.*and 10 more.*no such tensor"):
        await share(holders.loaded(tiny), holders.skeleton(deeper))
    with pytest.raises(WeightsMismatch, match="the engine's model has 'model.layers.2.*and 10 more.*no such tensor"):
        await share(holders.loaded(deeper), holders.skeleton(tiny))


async def test_another_rotary_base_is_found_though_no_weight_differs(
    make_model: Any, tiny: Path, tmp_path: Path, holders: Any
) -> None:
    other = make_model(tmp_path / "other", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    with pytest.raises(WeightsMismatch, match="inv_freq.*not saved with the weights"):
        await share(holders.loaded(tiny), holders.skeleton(other))


async def test_a_buffer_that_nothing_can_rebuild_is_refused(holders: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    with torch.device("meta"):
        trainer = holders.of(Model())
    with pytest.raises(WeightsMismatch, match="buffer 'table' of Model is on the meta device"):
        await share(holders.of(Model()), trainer)


async def test_the_transport_must_be_the_devices_own(tiny: Path, holders: Any) -> None:
    with pytest.raises(FitError, match="by cuda_ipc, and the engine's model is on cpu"):
        await OwnerExtension(holders.loaded(tiny)).export("cuda_ipc")


def test_half_precision_views_hold_the_same_values(holders: Any) -> None:
    from atropos_bridge_ipc import manifest, tensors

    model = nn.ParameterDict(
        {"a": torch.randn(5, 3), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.5), "d": torch.zeros(0, 4)}
    )
    described, found = tensors.describe(model)
    placed = manifest.place(described)
    flat = torch.zeros(manifest.end(placed), dtype=torch.uint8)
    for entry, tensor in zip(placed, found, strict=True):
        tensors.view(flat, entry).copy_(tensor.detach())
        np.testing.assert_array_equal(tensors.view(flat, entry).float(), tensor.detach().float())
