"""Estimate the server's memory from its options and the model's files. On a GPU, vLLM takes its whole share, needed or not."""

from __future__ import annotations

import math
from collections.abc import Iterable

from atropos_core.errors import FitError
from atropos_core.models.model_size import BYTES, ModelSize, read
from atropos_core.plugins.model_provider import SAMPLING, MemoryUse, Workload, halves
from atropos_engine_vllm.config import VLLMOptions

BATCHED_TOKENS = 8192  # tokens per batch: vLLM's default on a large GPU
GRAPHS = 1_000_000_000  # bytes of CUDA graphs of vLLM's default sizes
LIBRARIES = 1_500_000_000  # server, engine core and worker: three interpreters with torch and vLLM


def holds(options: VLLMOptions, workload: Workload) -> Iterable[MemoryUse]:
    if options.url is not None:
        return  # a server that this run did not start
    context = workload.context
    yield MemoryUse("interpreters and libraries", LIBRARIES)
    model = read(context.model)
    if model is None:
        return
    shared = "weights" if context.transport in ("posix_shm", "cuda_ipc") else ""
    own = context.label or "engine"
    for device in context.devices:
        on_cpu = device == "cpu"
        weights = model.parameters * element_bytes(options, model, device) // len(context.devices)
        yield MemoryUse("parameters", weights, device, shared=shared)
        phases = SAMPLING if options.enable_sleep_mode else ("",)
        if on_cpu:
            cache = int(options.kv_cache_gb * 1e9)
            for phase in phases:
                smaller = {f"{own}.kv_cache_gb": halves(options.kv_cache_gb, 0.25)}
                yield MemoryUse("keys and values", cache, device, phase, settings=smaller)
        elif device in workload.device_bytes:
            share = int(options.memory_share * workload.device_bytes[device])
            rest = max(share - weights, 0)
            beside = min(beside_bytes(options, model, device), rest)
            yield MemoryUse("activations and graphs", beside, device)
            less = {f"{own}.memory_share": halves(options.memory_share, 0.05)}
            for phase in phases:
                yield MemoryUse("keys and values", rest - beside, device, phase, settings=less)


def check_share(options: VLLMOptions, workload: Workload) -> None:
    """Raise FitError if the engine's share of a GPU cannot hold the weights and one sequence's keys and values.

    vLLM would fail at start-up."""
    context, model = workload.context, read(workload.context.model)
    for device in context.devices:
        total = workload.device_bytes.get(device)
        if options.url is not None or model is None or total is None or device == "cpu":
            continue
        element = element_bytes(options, model, device)
        longest = min(
            workload.prompt_tokens + workload.max_tokens, options.max_model_len or model.longest, model.longest
        )
        weights = model.parameters * element // len(context.devices)
        sequence = 2 * model.layers * model.key_width * element * longest // len(context.devices)
        if weights + sequence <= options.memory_share * total:
            continue
        least = math.ceil(100 * (weights + sequence) / total) / 100
        has, needs, keys = (f"{size / 1e9:.1f} GB" for size in (options.memory_share * total, weights, sequence))
        raise FitError(
            f"engine.memory_share = {options.memory_share:g} gives vLLM {has} of {device}, and weights of {needs} with keys and values of "
            f"{longest:,} tokens ({keys}) do not fit in that.",
            remedy=f"Set engine.memory_share={least:g} or more."
            if least <= 1
            else "Use a smaller model, or more of engine.devices.",
        )


def beside_bytes(options: VLLMOptions, model: ModelSize, device: str) -> int:
    """Estimate the bytes that a server on a GPU needs in addition to weights, keys and values, from its largest batches.

    The estimate is not checked against a measurement."""
    sampled = options.max_num_seqs * model.vocabulary * 4 * 3  # logits, probabilities and their order
    computed = BATCHED_TOKENS * (4 * model.hidden + 2 * model.intermediate) * element_bytes(options, model, device)
    return max(sampled, computed) + (0 if options.enforce_eager else GRAPHS)


def element_bytes(options: VLLMOptions, model: ModelSize, device: str) -> int:
    stored = "float32" if device == "cpu" else model.dtype
    return BYTES.get(stored if options.dtype == "auto" else options.dtype, 2)
