"""Engine "vllm" and trainer "grpo" with a bridge between them: updates, publishes while requests are in flight, and `kill -9`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atropos_core.errors import AtroposError
from tests.gpu import vllm_killed
from tests.gpu.memory import Memory
from tests.gpu.pair import Setting
from tests.gpu.report import Report

PUBLISHES = 3
BOUND = {"float32": 1e-4, "bfloat16": 0.2}  # nats; a run stops at 1e-4 and 0.5 (training.max_logprob_diff)
ATTENTION = re.compile(r"Using (\w+) attention backend")
SECOND_RUNNER = "Using V2 Model Runner"
GRAPHS = "Graph capturing finished"


@dataclass(frozen=True)
class Way:
    """How weights travel and vLLM computes, and which processes are killed at the end."""

    bridge: str
    dtype: str = "bfloat16"
    compiled: bool = False  # with CUDA graphs on a GPU
    runner: int | None = None  # vLLM's first or second model runner; None: the one that vLLM chooses
    family: str = "qwen3"
    kills: tuple[str, ...] = ()
    trainer: str = ""  # its device; empty: the engine's


async def updates(setting: Setting, report: Report, way: Way) -> None:
    """A random model of two layers. Every token of requests in flight is of the version that it names, five updates move the trainer
    and the engine alike, and a killed process is named."""
    from tests.vllm.ends import connected, five_updates
    from tests.vllm.load import publish_under_load, transformers_scorer, worst_difference

    on_cpu = setting.device == "cpu"
    if on_cpu and way.bridge != "ipc" and way.dtype == "bfloat16":  # with ipc vLLM multiplies by torch's own operations
        report.note(
            "bfloat16", "NOT RUN, but float32: vLLM's products in bfloat16 need instructions that not every CPU has"
        )
        way = replace(way, dtype="float32")
    bound = BOUND[way.dtype]
    memory = Memory(setting.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = _model(folder / "model", way)
        runner, variables = _runner(way, folder, on_cpu, report)
        before = memory.used_bytes()
        killed: vllm_killed.Killed | None = None
        try:
            with environment({**variables, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}):
                async with connected(model, way.bridge, folder / "run", _changes(setting, way, runner)) as ends:
                    load = await publish_under_load(ends, folder / "saved", publishes=PUBLISHES, concurrent=8)
                    report.holds(
                        "requests in flight were answered", len(load.answers) == load.requests, f"{load.requests}"
                    )
                    if way.bridge == "lora":
                        report.holds("each ended with the adapter that it began with", load.mixed == 0, f"{load.mixed}")
                    else:
                        report.at_least("replies that went on under new weights", load.mixed, 1)
                    worst, compared = worst_difference(load, folder / "saved", transformers_scorer)
                    report.holds("every token named a published version", compared == load.tokens, f"{compared} tokens")
                    report.at_most(
                        "logprobs of these apart from the named version's by transformers", worst, bound, "nats"
                    )
                    report.note("a publish under load, slowest (pause, write and resume)", max(load.publish_s), "s")

                    seen = await five_updates(ends)
                    report.at_most(
                        "logprobs of engine and trainer apart, after each of 5 updates",
                        max(seen.difference),
                        bound,
                        "nats",
                    )
                    report.note("the same, each", [float(f"{one:.3g}") for one in seen.difference], "nats")
                    report.at_least("a fixed probe moved by", seen.probe_shift, 0.5, "nats")
                    report.note("a publish, slowest of 5", max(seen.publish_s), "s")
                    _copied(report, way, [*load.bytes_copied, *seen.bytes_copied])
                    _computed(report, way, runner, on_cpu, next((folder / "run/logs").glob("*.vllm.log")).read_text())
                    if way.kills:
                        killed = vllm_killed.Killed.found(way.kills)
                        await killed.kill(ends, report)
        except AtroposError:
            if killed is None:  # after a kill, closing what is left may say that it is gone
                report.note("vLLM's log", said(folder))
                raise
        if killed is not None:
            await killed.leave_nothing(report)
            if on_cpu:
                report.note("the device's memory", "NOT MEASURED: a CPU uses the host's memory")
            else:
                await vllm_killed.comes_back(memory, before, report)


def _model(folder: Path, way: Way) -> Path:
    """With heads of 64 numbers, which vLLM's kernels take on every device."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tests.vllm.models import make_model

    logging.disable_progress_bar()
    heads = {"head_dim": 64} if way.family == "qwen3" else {}
    made = make_model(folder, way.family, ends=False, hidden_size=256, **heads)
    if way.dtype != "float32":
        model: Any = AutoModelForCausalLM.from_pretrained(made, dtype=getattr(torch, way.dtype))
        model.save_pretrained(made)
    return made


def _changes(setting: Setting, way: Way, runner: int | None) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "devices": [setting.device],
        "dtype": way.dtype,
        "max_num_seqs": 64,
        "enforce_eager": not way.compiled,
    }
    if setting.device != "cpu":
        engine["memory_share"] = 0.3
    elif runner == 2:
        engine["extra_args"] = ["--block-size", "32"]
    trainer: dict[str, Any] = {"devices": [way.trainer or setting.device], "dtype": way.dtype, "learning_rate": 5e-3}
    trainer["old_logprobs"] = "recompute"  # `publish_under_load` trains on one batch again and again
    if way.bridge == "lora":
        trainer["lora"] = {"rank": 8, "learning_rate": 1e-2}
    return {"engine": engine, "trainer": trainer}


def _runner(way: Way, folder: Path, on_cpu: bool, report: Report) -> tuple[int | None, dict[str, str]]:
    """Return the model runner that vLLM is to have, and its environment. On a CPU the worker lives in vLLM's core, as it does on one GPU,
    unless it is to be killed."""
    runner, variables = way.runner, {}
    if on_cpu and "worker" not in way.kills:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if on_cpu and runner == 2:
        python = os.environ.get("TRITON_PYTHON")
        if python is None or way.compiled:
            why = "compiled, on a CPU" if way.compiled else "a CPU, without TRITON_PYTHON"
            report.note("vLLM's second model runner", f"NOT RUN: {why}. The first one was taken")
            runner = 1
        else:
            from tests.vllm.triton import interpreter

            (folder / "triton").mkdir()
            variables |= interpreter(python, folder / "triton")
    if runner is not None:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = str(runner - 1)
    return runner, variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of the processes that are started inside."""
    kept = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def said(folder: Path) -> str:
    """The first errors of vLLM's logs below `folder`, with their tracebacks, and the end of each: a machine with a GPU is soon gone."""
    found = []
    for log in sorted(folder.rglob("*.vllm.log")):
        lines = log.read_text(errors="replace").splitlines()
        found += [
            log.name,
            *[line for line in lines if " ERROR " in line and "(APIServer" not in line][:40],
            "...",
            *lines[-10:],
        ]
    return "\n".join(found)


def _copied(report: Report, way: Way, copied: list[int]) -> None:
    if way.bridge == "ipc":
        report.holds("nothing copied", not any(copied), f"{sum(copied)} bytes")
    else:
        report.note("copied by a publish", max(copied), "bytes")


def _computed(report: Report, way: Way, runner: int | None, on_cpu: bool, log: str) -> None:
    """Report how vLLM computes, by its log."""
    if found := ATTENTION.search(log):
        report.note("vLLM's attention", found[1])
    second = SECOND_RUNNER in log
    report.holds(
        "vLLM's model runner", runner is None or second == (runner == 2), "the second" if second else "the first"
    )
    if on_cpu:
        report.note("CUDA graphs", "NOT RUN: a CPU has none")
    else:
        report.holds("CUDA graphs", (GRAPHS in log) == way.compiled, "captured" if GRAPHS in log else "none")
