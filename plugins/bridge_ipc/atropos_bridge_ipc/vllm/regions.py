"""Locate each parameter of the trainer's model in vLLM's parameters.

vLLM fuses what Hugging Face keeps apart (q, k and v; gate and up), pads the vocabulary and ties as one object. A Hugging
Face name leads to rows of a vLLM parameter by vLLM's own means: the model's `hf_to_vllm_mapper`, and the sizes that each
fused layer was built with. Nothing is taken from another layer or guessed from a shape. The trainer then compares every
value with the model directory's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atropos_bridge_ipc.manifest import Tensor
from atropos_bridge_ipc.vllm.names import Names
from atropos_core.errors import WeightsMismatch

QKV: Mapping[Any, int] = {"q": 0, "k": 1, "v": 2}


class CannotShare(Exception):
    """There is no single copy of these weights that Hugging Face parameters could be views of. The message says why."""


def check_shareable(model: nn.Module, config: Any, device: torch.device, names: Names) -> None:
    """Raise CannotShare if the model or the configuration (`config` is vLLM's) does not keep weights as the plain matrices
    of a checkpoint."""
    if (ranks := config.parallel_config.world_size) > 1:
        raise CannotShare(f"its weights are sharded over {ranks} workers")
    if config.lora_config is not None:
        raise CannotShare("it serves LoRA adapters, which wrap its layers")
    if config.quant_config is not None:
        raise CannotShare(f"its weights are quantised ({config.quant_config.get_name()})")
    if config.model_config.use_mla:
        raise CannotShare("its latent attention keeps a second, multiplied-out copy of some weights")
    if config.model_config.is_moe:
        raise CannotShare("its experts are fused in a layout of vLLM's own")
    plain = (names.plain_linear_method, names.plain_embedding_method)
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, (names.linear_base, names.embedding)) and type(method) not in plain:
            raise CannotShare(f"{path!r} keeps its weights in the layout of {type(method).__name__}")
        turns = isinstance(module, names.rotary) or any(leaf.endswith("inv_freq") for leaf in module._buffers)
        if turns and getattr(module, "cos_sin_cache", torch.empty(0)).ndim != 2:
            raise CannotShare(f"{path!r} ({type(module).__name__}) has no table of cosines and sines to compare")
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            raise CannotShare(f"{name!r} is empty: its weights were re-laid out for this processor")
        if parameter.device != device:
            raise CannotShare(f"{name!r} is on {parameter.device} and the model on {device}: it was offloaded")
        if not parameter.is_contiguous():
            raise CannotShare(f"{name!r} is stored with stride {list(parameter.stride())}, not row by row")
    _check_no_second_view(model)


def _check_no_second_view(model: nn.Module) -> None:
    """Refuse a model that keeps another tensor over a parameter's memory: it would read the old memory after the move."""
    named = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for leaf, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, torch.Tensor) and not value.is_meta and value.numel():
                name = named.get(value.untyped_storage().data_ptr())
                if name is not None:
                    raise CannotShare(f"{path!r} keeps another view of {name!r}, as {leaf!r}")


def regions(
    model: nn.Module, placed: Mapping[str, Tensor], wanted: Sequence[Tensor], *, tied: bool, names: Names
) -> tuple[Tensor, ...]:
    """Describe each of the trainer's tensors as rows of one of vLLM's. `placed` has vLLM's tensors by every name, with
    their places in the segment. Name, dtype, shape, stride and ties come from vLLM. Raises WeightsMismatch for a
    parameter without a counterpart on the other side, and CannotShare for an unknown layout of vLLM's."""
    found: dict[tuple[str, int], Tensor] = {}  # (vLLM's first name, offset) -> region
    for entry in wanted:
        missing = []
        for name in entry.names:
            mapped, shard = _mapped(model, name, names)
            if mapped is None or mapped not in placed:
                missing.append(name)
                continue
            region = _region(model, placed[mapped], name, mapped, shard, names)
            key = (placed[mapped].name, region.offset)
            before = found.get(key)
            found[key] = region if before is None else dataclasses.replace(before, aliases=(*before.aliases, name))
        if missing and (len(missing) == len(entry.names) or not tied):
            raise WeightsMismatch(
                f"the trainer's model has {missing[0]!r} ({entry}), and vLLM's {type(model).__name__} has no such parameter.",
                remedy="Trainer and engine must open the same model directory.",
            )
        if missing:  # vLLM has one name for what it ties
            of = next(key for key, region in found.items() if set(region.names) & set(entry.names))
            found[of] = dataclasses.replace(found[of], aliases=(*found[of].aliases, *missing))
    _check_covered(model, placed, found, names)
    return tuple(found.values())


def _mapped(model: Any, name: str, names: Names) -> tuple[str | None, Any]:
    """vLLM's parameter for a name of a checkpoint, and which part of a fused one (None: all of it)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if isinstance(mapper, names.mapper):
        return mapper._map_name_with_shard(name) or (None, None)
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        for number, part in enumerate(parts):
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}."), number
    return name, None


def _region(model: nn.Module, whole: Tensor, name: str, mapped: str, shard: Any, names: Names) -> Tensor:
    module = model.get_submodule(mapped.rpartition(".")[0])
    if isinstance(module, (names.qkv_linear, names.merged_linear)) and shard is not None:
        sizes = list(module.output_sizes)
        parts = [QKV.get(part, part) for part in (shard if isinstance(shard, list | tuple) else [shard])]
        together = parts == list(range(parts[0], parts[0] + len(parts)))
        if not together or not {*parts} <= {*range(len(sizes))} or sum(sizes) != whole.shape[0]:
            raise CannotShare(f"{name!r} is part {shard!r} of {mapped!r}, which has parts of {sizes} rows")
        return _rows(whole, name, sum(sizes[: parts[0]]), sum(sizes[parts[0] : parts[-1] + 1]))
    if shard is not None:
        raise CannotShare(
            f"{name!r} is part {shard!r} of {mapped!r}, a {type(module).__name__}, whose parts are unknown"
        )
    if isinstance(module, names.embedding):
        return _rows(whole, name, 0, module.org_vocab_size)  # the rows behind are padding
    return _rows(whole, name, 0, whole.shape[0]) if whole.shape else dataclasses.replace(whole, name=name, aliases=())


def _rows(whole: Tensor, name: str, first: int, count: int) -> Tensor:
    row = whole.stride[0] * whole.itemsize
    part = dataclasses.replace(
        whole, name=name, aliases=(), shape=(count, *whole.shape[1:]), offset=whole.offset + first * row
    )
    return dataclasses.replace(part, nbytes=part.span_bytes)


def _check_covered(
    model: nn.Module, placed: Mapping[str, Tensor], found: Mapping[tuple[str, int], Tensor], names: Names
) -> None:
    covered: dict[str, int] = {}
    for (name, _), region in found.items():
        covered[name] = covered.get(name, 0) + region.nbytes
    for whole in {entry.name: entry for entry in placed.values()}.values():
        module = model.get_submodule(whole.name.rpartition(".")[0])
        used = whole.nbytes
        if isinstance(module, names.embedding) and whole.shape:
            used = module.org_vocab_size * whole.stride[0] * whole.itemsize
        if covered.get(whole.name, 0) != used:
            raise WeightsMismatch(
                f"vLLM's {type(model).__name__} has {whole.name!r} ({whole}), of which parameters of the trainer's model cover"
                f" {covered.get(whole.name, 0)} of {used} bytes.",
                remedy="Trainer and engine must open the same model directory.",
            )
