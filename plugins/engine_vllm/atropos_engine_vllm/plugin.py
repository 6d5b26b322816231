"""Offers the engine "vllm"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import EngineProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Engine, Transport
    from atropos_core.plugins.model_provider import MemoryUse, SizeChoice, Workload
    from atropos_engine_vllm.config import VLLMOptions

HIGHEST_TEMPERATURE = 2.0  # that vLLM's SamplingParams take


def build(options: VLLMOptions, context: RunContext) -> Engine:
    from atropos_engine_vllm.engine import VLLMEngine

    return VLLMEngine(options, context)


def holds(options: VLLMOptions, workload: Workload) -> Iterable[MemoryUse]:
    from atropos_engine_vllm.memory import holds

    return holds(options, workload)


def sizes(options: VLLMOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    from atropos_engine_vllm.sizes import sizes

    return sizes(options, workload, free)


def check(options: VLLMOptions, workload: Workload) -> None:
    from atropos_core.errors import ConfigError
    from atropos_engine_vllm.differing import refuse_adapted_experts, refuse_differing
    from atropos_engine_vllm.memory import check_share
    from atropos_engine_vllm.router_replay import check_replay
    from atropos_engine_vllm.speculation import check_speculation
    from atropos_torch_models.model_directory import check_weights

    context = workload.context
    if options.enable_sleep_mode and context.max_staleness:
        raise ConfigError(
            f"{context.label}.enable_sleep_mode has no effect with training.max_staleness = {context.max_staleness}: rollouts are sampled "
            "while an update runs, and need their keys and values.",
            remedy="Remove it, or --set training.max_staleness=0.",
        )
    if workload.temperature > HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"engine 'vllm' takes temperatures of at most {HIGHEST_TEMPERATURE:g}, and sampling.temperature or evaluation.temperature is "
            f"{workload.temperature:g}.",
            remedy="Lower it, or use `--engine hf`.",
        )
    check_share(options, workload)
    check_weights(context.model)
    if options.url is None:
        refuse_differing(context.model, context.devices[0])
    check_replay(options, context)
    check_speculation(options, context, workload.min_p)
    refuse_adapted_experts(options, context)


def measures(options: VLLMOptions) -> bool:
    return options.speculation is not None


def dtype(options: VLLMOptions, workload: Workload) -> str:
    """Return the dtype of the weights, or "" for an external server (`url`), whose dtype is unknown here."""
    from atropos_engine_vllm import model

    if options.url is not None:
        return ""
    directory = workload.context.model
    if adapter := model.adapter_config(directory):
        directory = Path(adapter["base_model_name_or_path"])
    return model.dtype(model.read_config(directory), options.dtype, workload.context.devices[0] == "cpu")


def idle(options: VLLMOptions, devices: Sequence[str]) -> Mapping[str, str]:
    if devices[0] == "cpu":
        return {"memory_share": "it is of a GPU's memory; on a CPU kv_cache_gb bounds keys and values"}
    return {"kv_cache_gb": "it is for a CPU; on a GPU memory_share bounds keys and values"}


def announces(options: VLLMOptions) -> Mapping[str, Any]:
    """Announce the sampling precision, which a trainer may correct for."""
    return {f"engine/{options.dtype if options.url is None else 'unknown'}": True}


def transports(options: VLLMOptions) -> frozenset[Transport]:
    """An external server (`url`) shares no memory with us and does not run our weight-transfer engine."""
    if options.url is not None:
        return frozenset({"checkpoint", "adapter"})
    return frozenset({"posix_shm", "cuda_ipc", "copy", "broadcast", "checkpoint", "adapter"})


@hookimpl
def atropos_dry_run(plan: Any, figures: Path | None) -> Iterable[str]:
    """Report missing requirements of each server that a run would start here. On a cluster, vLLM may be installed on the nodes."""
    from atropos_core.errors import FitError
    from atropos_engine_vllm.versions import check_installed, installed

    for one in plan.engines:
        if one.offer.provider.build is build and one.options.url is None:
            try:
                check_installed(one.devices[0], installed())
            except FitError as error:
                yield f"{one.label}: a run here would end as its engine starts: {error}"


@hookimpl
def atropos_engines() -> Iterable[EngineProvider]:
    yield EngineProvider(
        name="vllm",
        summary="samples from a vLLM server that it starts, or attaches to; CPU, one GPU or several",
        config="atropos_engine_vllm.config:VLLMOptions",
        build=build,
        transports=transports,
        holds=holds,
        check=check,
        sizes=sizes,
        dtype=dtype,
        announces=announces,
        idle=idle,
        measures=measures,
        several_devices=True,
        requires=frozenset({"aiohttp"}),
        runs_in="process",
    )
