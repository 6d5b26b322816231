"""The checks of engine "vllm", in the order in which they tell most. Each says so if vLLM, or a package that it needs, is missing."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.types import Sampling
from tests.gpu import models
from tests.gpu.memory import Memory
from tests.gpu.pair import Setting, ids, started
from tests.gpu.publishing import publishes
from tests.gpu.report import Check, Report, gap
from tests.gpu.training import SHAPES
from tests.gpu.vllm_run import OF_RUNS, runs
from tests.gpu.vllm_updates import Way, updates

SLACK_BYTES = 80e6  # of a CPU's processes, which take memory for more than weights
NEEDS = ("vllm", *OF_RUNS, "atropos_testing", "atropos_env_gsm8k")
OURS = ("atropos_engine_vllm", "atropos_bridge_ipc", "atropos_bridge_nccl")

Run = Callable[[Setting, Report], Awaitable[None]]


async def one_copy(setting: Setting, report: Report) -> None:
    """The trainer's end of bridge "ipc" adds no memory of weights to that of the engine, and publishes with requests in flight take no
    time to speak of. On a GPU the shape of Qwen3-0.6B."""
    on_cpu = setting.device == "cpu"
    config = models.large(setting.parameters) if setting.small else models.qwen3(SHAPES["0.6B"])
    dtype = "float32" if on_cpu else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        size = models.make(config, dtype, setting.device, Path(folder))
        report.note("weights", size / 1e9, "GB")
        options: dict[str, Any] = {"max_num_seqs": 128} if on_cpu else {"max_num_seqs": 128, "memory_share": 0.4}
        async with started(setting, Path(folder), dtype, holder=True, vllm=options) as pair:
            await pair.children[1].peer.call("warm", deadline_s=120)
            began = time.perf_counter()
            await pair.open(holder=True)
            report.note("start of the engine, to its first token", time.perf_counter() - began, "s")
            memory = Memory(setting.device, [*pair.pids, *_below(pair.pids[0])])
            loaded = memory.used_bytes()
            await pair.connect()
            await pair.scale(1.0)  # and touches every page
            added = (memory.used_bytes() - loaded) / size
            report.at_most(
                "what attaching and a write into every weight added",
                added,
                SLACK_BYTES / size if on_cpu else 0.1,
                "copies",
            )
            await publishes(setting, pair, report)
            many, length = (8, 16) if setting.small else (128, 256)
            prompt = ids(np.random.default_rng(5), 600, 32)
            for name in ("first time", "second time"):
                began = time.perf_counter()
                made = await pair.engine.sample(prompt, many, Sampling(length), range(many), 240)
                count = sum(len(one.tokens) for one in made)
                what = f"sampled by vLLM, {many} replies of {length} tokens at once, {name}"
                report.note(what, count / (time.perf_counter() - began), "tokens/s")


def _below(pid: int) -> list[int]:
    import psutil

    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


async def sleeps(setting: Setting, report: Report) -> None:
    """Engine "vllm" gives the memory of keys and values back and takes it again, and samples the same tokens."""
    from tests.gpu.sleeping import CACHE_GB, slept

    with tempfile.TemporaryDirectory() as folder:
        models.make(models.SMALL, "float32" if setting.device == "cpu" else "bfloat16", "cpu", Path(folder) / "model")
        found = await slept(setting.device, Path(folder) / "model", Path(folder))
    report.note("taken by the engine", found.opened_bytes / 2**30, "GiB")
    given, first = found.given_back_bytes, found.given_back_bytes[0]
    report.note("given back, each time", [round(one / 2**30, 3) for one in given], "GiB")
    # On a CPU only what was used comes again.
    least, whole = (first, CACHE_GB * 2**30) if setting.device == "cpu" else (min(given), found.opened_bytes)
    report.at_least("of the keys and values" if setting.device == "cpu" else "of all that it took", least / whole, 0.9)
    report.note("a release, slowest", max(found.release_s), "s")
    report.note("the first token after it, slowest", max(found.first_token_s), "s")
    report.holds("the same tokens after each", all((one.tokens == found.made[0].tokens).all() for one in found.made))
    report.at_most(
        "logprobs apart", max(gap([one.logprobs], [found.made[0].logprobs]) for one in found.made), 0.01, "nats"
    )


def missing(*more: str) -> list[str]:
    """Return what the checks need but is not installed. vLLM finds our packages by their entry points, so these count too."""
    found = [name for name in (*NEEDS, *more) if importlib.util.find_spec(name) is None]
    ours = entry_points(group="vllm.general_plugins")
    return found + [f"the entry point {name}" for name in OURS if name not in ours.names]


async def _with_vllm(setting: Setting, report: Report, run: Run, *more: str) -> None:
    if lacking := missing(*more):
        report.note("NOT RUN", f"this needs vLLM, and our packages installed next to it. Missing: {', '.join(lacking)}")
    else:
        await run(setting, report)


def _check(name: str, run: Run, deadline_s: float, *more: str) -> Check:
    return Check(name, lambda setting, report: _with_vllm(setting, report, run, *more), deadline_s, "vllm")


# Those of bridge "ipc" have every pair of: compiled or eager, bfloat16 or float32, vLLM's first or second model runner.
WAYS = {
    "vllm_ipc_compiled_bfloat16": Way("ipc", "bfloat16", True, 2, "qwen3", ("trainer", "core")),
    "vllm_ipc_eager_bfloat16": Way("ipc", "bfloat16", False, 1, "qwen2", ("server",)),
    "vllm_ipc_eager_float32": Way("ipc", "float32", False, 2, "llama3", ("guard",)),
    "vllm_ipc_compiled_float32": Way("ipc", "float32", True, 1, "qwen3", ("engine",)),
    "vllm_checkpoint": Way("checkpoint", family="llama3", kills=("worker",)),
    "vllm_lora": Way("lora"),
    # NCCL joins no two processes on one GPU: here the trainer is on the CPU, so that weights go over gloo.
    "vllm_nccl": Way("nccl", "float32", trainer="cpu"),
}


def _updates(name: str) -> Check:
    way = WAYS[name]
    return _check(name, partial(updates, way=way), 180, *(("peft",) if way.bridge == "lora" else ()))


CHECKS = (
    _updates("vllm_ipc_compiled_bfloat16"),
    _check("vllm_run", runs, 200),
    _updates("vllm_ipc_eager_bfloat16"),
    _check("vllm_one_copy", one_copy, 240),
    _updates("vllm_lora"),
    _updates("vllm_checkpoint"),
    _check("vllm_sleep", sleeps, 200),
    _check("vllm_ngram", partial(runs, kind="ngram"), 200),
    _check("vllm_fp8", partial(runs, kind="fp8"), 200),
    _updates("vllm_ipc_eager_float32"),
    _updates("vllm_ipc_compiled_float32"),
    _updates("vllm_nccl"),
)
