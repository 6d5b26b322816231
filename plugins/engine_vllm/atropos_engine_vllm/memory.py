"""What the server will hold, from its options and the model's files. On a GPU it takes its share, whatever it needs."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_core.models.model_size import BYTES, read
from atropos_core.plugins.provider import Holding, Workload
from atropos_engine_vllm.config import VLLMOptions

LIBRARIES = 1_500_000_000  # server, engine core and worker: three interpreters with torch and vLLM


def holds(options: VLLMOptions, workload: Workload) -> Iterable[Holding]:
    if options.url is not None:
        return  # a server of somebody else's
    context = workload.context
    yield Holding("interpreters and libraries", LIBRARIES)
    model = read(context.model)
    if model is None:
        return
    shared = "weights" if context.transport in ("posix_shm", "cuda_ipc") else ""
    for device in context.devices:
        on_cpu = device == "cpu"
        element = BYTES.get(("float32" if on_cpu else model.dtype) if options.dtype == "auto" else options.dtype, 2)
        weights = model.parameters * element // len(context.devices)
        yield Holding("parameters", weights, device, shared=shared, change="use a smaller model")
        if on_cpu:
            yield Holding(
                "keys and values", int(options.kv_cache_gb * 2**30), device, change="lower engine.kv_cache_gb"
            )
        elif device in workload.device_bytes:
            share = int(options.memory_share * workload.device_bytes[device])
            rest = max(share - weights, 0)
            yield Holding("keys and values, graphs", rest, device, change="lower engine.memory_share")
