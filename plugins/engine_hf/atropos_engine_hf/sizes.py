"""Sizes of the engine that cost only time and memory: room for keys and values, rows of a batch, tokens of a prefill."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from atropos_core.models.model_size import read
from atropos_core.plugins.model_provider import SizeChoice, Workload
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.memory import sequence_bytes

CACHES_GB = (24.0, 16.0, 12.0, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.75, 0.5, 0.25)
BATCHES = (128, 64, 32)
PREFILLS = (2048, 1024)


# Slower, for each further round of rollouts: on a GPU, a step of few rows takes as long as one of many.
ROUND = {"cpu": 0.05, "cuda": 0.4}
FEWER = 0.1  # slower, for each further step down


def sizes(options: HFOptions, workload: Workload, free: Collection[str]) -> Sequence[SizeChoice]:
    """Return less and less room for keys and values, down to that of one sequence; then fewer rows, then shorter prefills. On a GPU the
    first has room for all rollouts at once."""
    model = read(workload.context.model)
    if model is None:
        return ()
    rows, kind = min(options.max_batch, workload.concurrent_rollouts), workload.context.devices[0].partition(":")[0]
    one_gb = sequence_bytes(options, workload, model) / 1e9
    made = {name: getattr(options, name) for name in ("kv_cache_gb", "max_batch", "prefill_tokens") if name in free}
    found = []
    if "kv_cache_gb" in made:
        first = float(math.ceil(rows * one_gb)) if kind != "cpu" else options.kv_cache_gb
        first = max(options.kv_cache_gb, first)
        least = math.ceil(100 * one_gb) / 100
        smaller = {one for one in (options.kv_cache_gb, *CACHES_GB, least) if max(least, CACHES_GB[-1]) <= one < first}
        for cache in (first, *sorted(smaller, reverse=True)):
            made["kv_cache_gb"] = cache
            found.append(SizeChoice(ROUND.get(kind, 0.4) * max(rows * one_gb / cache - 1, 0), dict(made)))
    else:
        found.append(SizeChoice(0, dict(made)))
    for name, values in {"max_batch": BATCHES, "prefill_tokens": PREFILLS}.items():
        for value in values if name in made else ():
            if value < min(made[name], rows if name == "max_batch" else made[name]):
                made[name] = value
                found.append(SizeChoice(found[-1].slower + FEWER, dict(made)))
    return found
