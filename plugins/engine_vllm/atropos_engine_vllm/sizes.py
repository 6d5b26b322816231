"""Sizes of the server that cost only time and memory: its share of a GPU, sleep during updates, and the longest context."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from atropos_core.models.model_size import ModelSize, read
from atropos_core.plugins.model_provider import SizeChoice, Workload
from atropos_engine_vllm.config import VLLMOptions
from atropos_engine_vllm.memory import beside_bytes, element_bytes

ALONE = 0.9  # of a GPU that no other component uses: vLLM's own default (gpu_memory_utilization)
STEP = 0.05
CACHES_GB = (0.75, 0.5, 0.25)  # on a CPU, after the default
SLEEPS = 0.05  # slower: keys and values leave and return at each update
ROUND = 0.4  # slower, for each further round of rollouts: few rows take as long as many


def sizes(options: VLLMOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    """Return smaller and smaller shares of a GPU, each awake and asleep during updates. Each comes with the longest context of which it
    holds one sequence, if that is not the model's own: vLLM starts only with such."""
    model = read(workload.context.model)
    if model is None or options.url is not None:
        return ()
    found = []
    for slower, values in _memory(options, workload, model, free):
        changed = options.model_copy(update=values)
        context = {"max_model_len": _context(changed, workload, model)} if "max_model_len" in free else {}
        found.append(SizeChoice(slower, {**values, **context}))
    return found


def _memory(
    options: VLLMOptions, workload: Workload, model: ModelSize, free: Collection[str]
) -> Iterator[tuple[float, dict[str, Any]]]:
    device = workload.context.devices[0]
    rows = min(options.max_num_seqs, workload.concurrent_rollouts)
    sequence = _sequence(options, workload, model)
    if device == "cpu":
        caches = [options.kv_cache_gb, *(one for one in CACHES_GB if one < options.kv_cache_gb)]
        for number, cache in enumerate(caches if "kv_cache_gb" in free else [options.kv_cache_gb]):
            yield SLEEPS * number, {"kv_cache_gb": cache} if "kv_cache_gb" in free else {}
        return
    if (total := workload.device_bytes.get(device)) is None:
        yield 0, {}
        return
    sleeps = [options.enable_sleep_mode]
    if "enable_sleep_mode" in free and workload.takes_turns and workload.shares_devices:
        sleeps = [False, True]
    shares, fixed = [options.memory_share], _fixed(options, workload, model)
    if "memory_share" in free:
        least = min(math.ceil(100 * (fixed + sequence) / total) / 100, ALONE)
        usual = workload.shares_devices and options.memory_share >= least
        first = options.memory_share if usual else max(options.memory_share, ALONE)
        steps = [round(first - STEP * number, 2) for number in range(20)]
        shares = [*(one for one in steps if one > least), least]
    for sleep in sleeps:
        for number, share in enumerate(shares):
            rounds = rows * sequence / max(share * total - fixed, sequence)
            slower = number / 1000 + SLEEPS * sleep + ROUND * max(rounds - 1, 0)
            values = {"memory_share": share, "enable_sleep_mode": sleep}
            yield slower, {name: value for name, value in values.items() if name in free}


def _context(options: VLLMOptions, workload: Workload, model: ModelSize) -> int | None:
    """Return the tokens of the longest sequence, None for the model's own, of which keys and values have room. At least the run's
    own prompts and replies, or the check of the share would not see that they are too long."""
    device, total = workload.context.devices[0], workload.device_bytes.get(workload.context.devices[0])
    if device == "cpu":
        room = options.kv_cache_gb * 1e9
    elif total is None:
        return options.max_model_len
    else:
        room = options.memory_share * total - _fixed(options, workload, model)
    token = _token(options, workload, model)
    if room >= model.longest * token:
        return options.max_model_len
    least = min(workload.prompt_tokens + workload.max_tokens, model.longest)
    return max(int(room // token) // 64 * 64, least)


def _fixed(options: VLLMOptions, workload: Workload, model: ModelSize) -> int:
    device, parts = workload.context.devices[0], len(workload.context.devices)
    return model.parameters * element_bytes(options, model, device) // parts + beside_bytes(options, model, device)


def _token(options: VLLMOptions, workload: Workload, model: ModelSize) -> int:
    device, parts = workload.context.devices[0], len(workload.context.devices)
    return 2 * model.layers * model.key_width * element_bytes(options, model, device) // parts


def _sequence(options: VLLMOptions, workload: Workload, model: ModelSize) -> int:
    return min(workload.prompt_tokens + workload.max_tokens, model.longest) * _token(options, workload, model)
