"""The flags and the environment of a server that the engine starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, FitError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import MOST_KEPT, MOST_TIES
from atropos_engine_vllm import router_replay, speculation
from atropos_engine_vllm.access import KEY_VARIABLE
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.model import keeps_state, read_config

SERVED = "policy"  # the model's name in requests
EXTENSION = "atropos_engine_vllm.reload.Reloading"
SLEEPING = {
    "cpu": "atropos_engine_vllm.cpu_worker.SleepingCPUWorker",
    "cuda": "atropos_engine_vllm.cuda_worker.SleepingCUDAWorker",
}
# On a CPU vLLM 0.32's worker dies when a seeded request's prompt is computed in parts: it would step the generator back.
WHOLE_PROMPTS = "--no-enable-chunked-prefill"
TRANSFERRED = ("posix_shm", "cuda_ipc", "copy", "broadcast")  # transports that go through a weight-transfer engine
_KEEP_ALIVE_S = 3600  # a connection that the server closes while we write on it costs a request


def flags(options: VLLMOptions, context: RunContext, dtype: str) -> list[str]:
    """The arguments of `vllm serve`. Raises ConfigError for max_loras if no adapters travel to this engine."""
    on_cpu = context.devices[0] == "cpu"
    made = ["--model", str(context.model.resolve()), "--served-model-name", SERVED]
    made += ["--dtype", dtype, "--generation-config", "vllm", "--seed", str(context.seed % 2**31)]
    made += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    made += ["--max-logprobs", str(MOST_KEPT + MOST_TIES)]  # of what top_p, top_k and min_p keep
    made += ["--max-num-seqs", str(options.max_num_seqs), "--tensor-parallel-size", str(len(context.devices))]
    made += ["--enable-prefix-caching" if _caches_prefixes(options, context) else "--no-enable-prefix-caching"]
    made += ["--middleware", "atropos_engine_vllm.access.OnlyOurs", "--disable-uvicorn-access-log"]
    made += ["--worker-extension-cls", EXTENSION]
    if _eager(options, context):
        made += ["--enforce-eager"]
    if on_cpu:
        made += ["--kv-cache-memory-bytes", str(int(options.kv_cache_gb * 1e9))]
        made += [WHOLE_PROMPTS]
    else:
        made += ["--gpu-memory-utilization", str(options.memory_share)]
    if options.enable_sleep_mode:
        made += ["--worker-cls", SLEEPING["cpu" if on_cpu else "cuda"], *([] if on_cpu else ["--enable-sleep-mode"])]
    if options.max_model_len is not None:
        made += ["--max-model-len", str(options.max_model_len)]
    if holds_adapters(context):
        rank = max(announced_adapters(context).get("rank", 1), options.max_lora_rank if named_adapters(context) else 1)
        made += ["--enable-lora", "--max-loras", str(options.max_loras), "--max-lora-rank", str(possible_rank(rank))]
        made += ["--max-cpu-loras", str(options.lora_slots(named_adapters(context)))]
    _refuse_idle(options, context)
    if router_replay.records_experts(context):
        made += [router_replay.FLAG]
    made += speculation.flags(options)
    if transfer := _transfer(context):
        made += ["--weight-transfer-config", json.dumps({"backend": transfer})]
    return made + options.extra_args


def _refuse_idle(options: VLLMOptions, context: RunContext) -> None:
    """Raises ConfigError for options of adapters that have no effect here, or that named adapters do not work with."""
    label = context.label or "engine"
    if not holds_adapters(context):
        for name in ("max_loras", "max_cpu_loras", "max_lora_rank"):
            if options.changed(name):
                raise ConfigError(
                    f"{label}.{name} has no effect: this engine receives no adapters.",
                    remedy="Remove it: named adapters come only with `atropos tinker`."
                    if name == "max_lora_rank"
                    else "Remove it, or train adapters: [trainer.lora] with --bridge lora.",
                )
    elif not named_adapters(context):
        if options.changed("max_lora_rank"):
            raise ConfigError(
                f"{label}.max_lora_rank has no effect: this engine only receives the trainer's adapter, whose rank is trainer.lora.rank.",
                remedy="Remove it.",
            )
    elif context.devices[0] == "cpu" and options.enforce_eager is False:
        raise ConfigError(
            f"{label}.enforce_eager = false does not work with named adapters on a CPU: compiled, vLLM computes rows without an adapter"
            " with the adapter of others.",
            remedy="Leave it out: eager is the default on a CPU.",
        )


def _caches_prefixes(options: VLLMOptions, context: RunContext) -> bool:
    """False for models with states on a CPU: vLLM caches these only if prompts may be computed in parts (see WHOLE_PROMPTS)."""
    on_cpu = context.devices[0] == "cpu"
    if not options.prefix_caching or not on_cpu or not (context.model / "config.json").is_file():
        return options.prefix_caching
    return not keeps_state(read_config(context.model))


def _eager(options: VLLMOptions, context: RunContext) -> bool:
    return context.devices[0] == "cpu" if options.enforce_eager is None else options.enforce_eager


def environment(options: VLLMOptions, context: RunContext, scratch: Path, key: str) -> dict[str, str]:
    """Variables that are added to ours. Everything that vLLM would put into the temporary directory goes to `scratch`."""
    made = {
        KEY_VARIABLE: key,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, versions, weight transfer, reload
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_S),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "TMPDIR": str(scratch),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # otherwise `scratch` takes it along, and each start compiles again
        cache = Path(
            os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        )  # not in /tmp, where other users could place one
        made |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "atropos" / "torchinductor")}
    if context.devices[0] == "cpu":
        # Bound threads stay on their cores even if other processes need them. On a CPU that trainer and engine share,
        # the kernel places threads better.
        made |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}
        if _eager(options, context):
            # Otherwise the first token waits for a C++ compiler; compiled, ranking logprobs is only a little faster.
            made |= {"TORCH_COMPILE_DISABLE": "1"}
        if context.threads:
            made |= {"OMP_NUM_THREADS": str(context.threads)}
    else:
        made |= {"CUDA_VISIBLE_DEVICES": _visible(context.devices)}
    if router_replay.records_experts(context):
        made |= router_replay.VARIABLES
    if options.speculation is not None:
        made |= speculation.VARIABLES
    if holds_adapters(context):
        made |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    if transfer := _transfer(context):
        made |= {"ATROPOS_WEIGHT_TRANSFER": transfer, "ATROPOS_WEIGHT_TRANSPORT": str(context.transport)}
    return made


def _transfer(context: RunContext) -> str | None:
    name: str | None = context.announced.get("weight_transfer") if context.transport in TRANSFERRED else None
    return name


def announced_adapters(context: RunContext) -> dict[str, Any]:
    """The trainer's announcement of its adapters, if they travel to this engine."""
    return dict(context.announced.get("lora", {})) if context.transport == "adapter" else {}


def named_adapters(context: RunContext) -> int:
    """Return how many named adapters clients will use at once; 0: none."""
    return int(context.announced.get("named_adapters", 0)) if context.transport == "adapter" else 0


def holds_adapters(context: RunContext) -> bool:
    return bool(announced_adapters(context)) or named_adapters(context) > 0


def possible_rank(rank: int) -> int:
    """The smallest rank that vLLM has kernels for and that is at least this one."""
    for possible in (1, 8, 16, 32, 64, 128, 256, 320, 512):
        if rank <= possible:
            return possible
    raise FitError(f"the trainer's adapter has rank {rank}, but vLLM runs adapters only up to rank 512.")


def _visible(devices: tuple[str, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for these. Raises FitError for other devices than CUDA's."""
    numbers = []
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    for device in devices:
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number or "0").isdigit():
            raise FitError(f"engine 'vllm' runs on \"cpu\" or on CUDA devices, not on {', '.join(devices)}.")
        numbers.append(int(number or 0))
    if seen is None:
        return ",".join(map(str, numbers))
    names = seen.split(",")  # "cuda:0" is the first of those that this process may use
    if max(numbers) >= len(names):
        raise FitError(f"engine.devices names {', '.join(devices)}, but CUDA_VISIBLE_DEVICES is {seen!r}.")
    return ",".join(names[number] for number in numbers)
