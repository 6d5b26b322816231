"""Estimate the engine's memory from its options and the model's files, without loading weights or importing torch."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_core.models.model_size import BYTES, ModelSize, read
from atropos_core.plugins.model_provider import CONTEXT, CONTEXT_BYTES, SAMPLING, MemoryUse, Workload, halves
from atropos_engine_hf import limits
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decode_path import before_start

LIBRARIES = 420_000_000  # a child with torch and transformers: benchmarks/plan.py
OVERHEAD = 60_000_000  # what libraries allocate once they work
SAMPLED = 1 << 24  # elements of [rows, vocabulary] float64 at once, four times: sampler.py
SCORED = 1 << 26  # of logits in fp32, twice: scoring.py


def holds(options: HFOptions, workload: Workload) -> Iterable[MemoryUse]:
    context = workload.context
    yield MemoryUse("interpreter and libraries", LIBRARIES)
    model = read(context.model)
    if model is None:
        return
    device = context.devices[0]
    element = _element(options, device, model)
    shared = "weights" if context.transport in ("posix_shm", "cuda_ipc") else ""
    weights = model.parameters * element
    if options.quantization is not None:
        yield MemoryUse("model before it is packed", weights, "cpu", "opening")
        weights = model.quantized_bytes(options.quantization, element)
    yield MemoryUse("parameters", weights, device, shared=shared)
    if blocked := blocked_bytes(options, workload):
        yield MemoryUse("matrices in blocks", blocked)
    own = context.label or "engine"
    fewer = {f"{own}.max_batch": halves(min(options.max_batch, workload.concurrent_rollouts), 8)}
    rows = min(options.max_batch, workload.concurrent_rollouts)
    cache = min(rows * sequence_bytes(options, workload, model), int(options.kv_cache_gb * 1e9))
    tokens = min(options.prefill_tokens, rows * workload.prompt_tokens)
    prefill = tokens * (4 * model.hidden + 3 * model.intermediate + model.query_width) * element
    logits = rows * model.vocabulary * element + 4 * 8 * min(rows * model.vocabulary, SAMPLED)
    smaller = {f"{own}.kv_cache_gb": halves(min(options.kv_cache_gb, cache / 1e9), 0.25)}
    for phase in SAMPLING if cache > limits.KEPT else ("",):
        yield MemoryUse("keys and values", cache, device, phase, settings={**smaller, **fewer})
    yield MemoryUse("prefill and sampling", prefill + logits, device, "sampling", settings=fewer)
    if options.cuda_graphs and device != "cpu":  # they keep what a step computes with, and share it
        for phase in SAMPLING if cache > limits.KEPT else ("",):
            layers = rows * (4 * model.hidden + 3 * model.intermediate + model.query_width) * element
            yield MemoryUse("CUDA graphs", layers + logits, device, phase, settings=fewer)
    scored = 2 * 4 * min(tokens * model.vocabulary, SCORED)
    shorter = {f"{own}.prefill_tokens": halves(options.prefill_tokens, 256)}
    yield MemoryUse("rescoring", prefill + scored, device, "rescoring", settings=shorter)
    yield MemoryUse("buffers of libraries", OVERHEAD, device)
    if device != "cpu":
        yield MemoryUse(CONTEXT, CONTEXT_BYTES, device)


def blocked_bytes(options: HFOptions, workload: Workload) -> int:
    """Return the bytes of the second copy of the matrices (blocked_weights.py); 0 if there is none."""
    model, device = read(workload.context.model), workload.context.devices[0]
    if model is None or device != "cpu" or options.quantization is not None:
        return 0
    element = _element(options, device, model)
    matrices = sum(out * into for out, into in model.linear().values()) + model.vocabulary * model.hidden
    size = matrices * element
    return size if element < 8 and matrices >= limits.BLOCKED_FROM and size <= limits.BLOCKED_BYTES else 0


def sequence_bytes(options: HFOptions, workload: Workload, model: ModelSize) -> int:
    """Return the bytes of what is kept of one sequence at its end. In slots, memory grows in steps of 64 tokens."""
    length = min(workload.prompt_tokens + workload.max_tokens, model.longest)
    element = _element(options, workload.context.devices[0], model)
    path = before_start(options, workload.context.model)
    if (row := path.row_bytes.get(element)) is not None:
        return row.of(length)
    return 2 * model.layers * model.key_width * element * (-(-length // 64) * 64)


def _element(options: HFOptions, device: str, model: ModelSize) -> int:
    dtype = "float32" if options.dtype == "auto" and device == "cpu" else options.dtype
    return BYTES.get(model.dtype if dtype == "auto" else dtype, 2)
