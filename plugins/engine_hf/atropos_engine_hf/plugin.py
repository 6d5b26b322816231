"""Offers the engine "hf"."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.errors import FitError
from atropos_core.plugins.model_provider import EngineProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Engine, Transport
    from atropos_core.plugins.model_provider import MemoryUse, SizeChoice, Workload
    from atropos_engine_hf.config import HFOptions


def build(options: HFOptions, context: RunContext) -> Engine:
    adapts = context.transport == "adapter" or (context.model / "adapter_config.json").exists()
    if adapts and importlib.util.find_spec("peft") is None:
        raise FitError(
            "engine 'hf' is to sample with an adapter, which needs the module 'peft', and that is not installed.",
            remedy="pip install atropos-plugin-engine-hf[lora]",
        )
    if options.quantization is not None:
        _check_quantized(options, context)
    from atropos_engine_hf.engine import HFEngine

    return HFEngine(options, context)


def _check_quantized(options: HFOptions, context: RunContext) -> None:
    option = f'engine.quantization = "{options.quantization}"'
    if context.transport not in ("adapter", None):  # an evaluation has none
        raise FitError(
            f"{option} is for a base beside adapters, and this run moves whole models ({context.transport}).",
            remedy="Use --bridge lora, or leave the option out.",
        )
    if options.quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise FitError(
            f"{option} needs the module 'bitsandbytes', which is not installed.",
            remedy="pip install atropos-plugin-engine-hf[bitsandbytes]",
        )


def holds(options: HFOptions, workload: Workload) -> Iterable[MemoryUse]:
    from atropos_engine_hf.memory import holds

    return holds(options, workload)


def keeps(options: HFOptions, workload: Workload) -> str:
    from atropos_engine_hf.memory import blocked_bytes

    size = blocked_bytes(options, workload)
    return f"a second copy of the matrices for faster decoding, {size / 1e6:,.0f} MB" if size else ""


def sizes(options: HFOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    from atropos_engine_hf.sizes import sizes

    return sizes(options, workload, free)


def check(options: HFOptions, workload: Workload) -> None:
    from atropos_engine_hf.decode_path import NO_GRAPHS, NOT_IN_SLOTS, SLOTS, before_start, model_type
    from atropos_torch_models.model_directory import check_experts, check_weights

    check_weights(workload.context.model)
    if workload.context.announced.get("router_replay"):
        check_experts(workload.context.model, "hf")
    path = before_start(options, workload.context.model)
    if options.cuda_graphs and path.name != SLOTS and workload.context.devices[0] != "cpu":
        raise FitError(NOT_IN_SLOTS.format(kind=model_type(workload.context.model)), remedy=NO_GRAPHS)


def idle(options: HFOptions, devices: Sequence[str]) -> Mapping[str, str]:
    return {"cuda_graphs": "only a GPU has CUDA graphs"} if devices[0] == "cpu" else {}


def path(options: HFOptions, workload: Workload) -> str:
    from atropos_engine_hf.decode_path import before_start

    return before_start(options, workload.context.model).line


def dtype(options: HFOptions, workload: Workload) -> str:
    from atropos_torch_models.model_directory import loaded_dtype

    return loaded_dtype(workload.context.model, options.dtype, workload.context.devices[0])


def announces(options: HFOptions) -> Mapping[str, Any]:
    """Announce the sampling precision, which a trainer may correct for."""
    return {f"engine/{options.dtype}": True}


def transports(options: HFOptions) -> frozenset[Transport]:
    """Return the supported transports. The run's devices decide which kind of shared memory is used."""
    return frozenset({"posix_shm", "cuda_ipc", "broadcast", "checkpoint", "adapter"})


@hookimpl
def atropos_engines() -> Iterable[EngineProvider]:
    yield EngineProvider(
        name="hf",
        summary="samples from a Hugging Face model by a batched decode loop; CPU or one GPU",
        config="atropos_engine_hf.config:HFOptions",
        build=build,
        transports=transports,
        holds=holds,
        check=check,
        sizes=sizes,
        dtype=dtype,
        path=path,
        keeps=keeps,
        idle=idle,
        announces=announces,
        requires=frozenset({"torch", "transformers"}),
        runs_in="process",
    )
