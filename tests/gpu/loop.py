"""The whole loop of sampling and training on one GPU, compared with TRL's on the same model, prompts, lengths and groups."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from atropos_core.errors import AtroposError
from atropos_core.guards.deadlines import within
from tests.gpu.memory import Memory
from tests.gpu.pair import ROOT, Setting
from tests.gpu.report import Report
from tests.gpu.vllm_run import OF_RUNS, ended, said

SKIP = 2  # steps that warm up
TRL_S = 240  # for one of its runs
GOAL = 1.5  # times TRL's trajectories/s
SAME = 0.02  # by which the mean length of replies may differ: a random model rarely ends one
RATE = 1e-6
QUESTION = "Anna has {} apples and buys {} more. " * 8 + "How many now?"
ENVIRONMENT = '''
from hashlib import sha256
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task

QUESTIONS = {questions!r}


class Digests(Environment):
    """Rewards that differ, whatever is said."""

    def tasks(self, split):
        return [Task(f"{{split}}-{{at}}", ({{"role": "user", "content": text}},)) for at, text in enumerate(QUESTIONS)]

    async def score(self, task, reply):
        return Score(sha256(reply["content"].encode()).digest()[0] / 255)
'''


@dataclass(frozen=True)
class Loop:
    """One comparison. A step has `prompts` groups of `group` replies."""

    steps: int = 8
    prompts: int = 16
    group: int = 8
    max_tokens: int = 256
    batch: int = 16  # sequences that TRL puts through the model at once
    vllm: float = 0.3  # of the GPU's memory

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group

    def questions(self) -> list[str]:
        return [QUESTION.format(*(n + at for at in range(16))) for n in range(self.steps * self.prompts)]


SMALL = Loop(steps=4, prompts=2, group=2, max_tokens=12, batch=4)


async def loop(setting: Setting, report: Report) -> None:
    """Trajectories/s, tokens/s of sampling and of updates, idle shares and memory, of this project with engine "vllm" and engine "hf",
    and of TRL with vLLM and with transformers' `generate`; each if it is installed."""
    lacking = [name for name in OF_RUNS if importlib.util.find_spec(name) is None]
    if lacking:
        report.note("NOT RUN", f"this needs our packages. Missing: {', '.join(lacking)}")
        return
    work = SMALL if setting.small else Loop()
    report.note("a step", f"{work.prompts} groups of {work.group} replies of {work.max_tokens} tokens")
    ours: dict[str, dict[str, float]] = {}
    theirs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _make_model(setting, folder / "model")
        with_vllm = importlib.util.find_spec("vllm") is not None
        for engine in ("vllm", "hf") if with_vllm else ("hf",):
            name = f'Atropos, engine "{engine}"'
            ours[name] = await _ours(setting, report, folder, work, engine)
            judge(report, work, name, ours[name])
        python = _python_of_trl()
        if python is None:
            report.note("TRL", "NOT RUN: install it here, or set TRL_PYTHON to a Python that has it")
        else:
            for sampler in ("vllm", "generate") if with_vllm and setting.device != "cpu" else ("generate",):
                name = f"TRL, {sampler}"
                try:
                    theirs[name] = await within(_theirs(setting, folder, work, python, sampler), TRL_S, name)
                except (RuntimeError, AtroposError) as error:  # theirs: it says nothing of this project
                    report.note(name, f"NOT MEASURED: {str(error)[-1000:]}")
                else:
                    judge(report, work, name, theirs[name])
    compare(report, ours, theirs)


def _make_model(setting: Setting, folder: Path) -> None:
    """Write the shape of Qwen3-0.6B, or a tiny one, with random weights and the tokenizer of the tiny policy."""
    from tests.gpu import models
    from tests.gpu.training import SHAPES

    small = SHAPES["small"] | {"vocab_size": 20_000}  # so many that hardly a reply ends before its last token
    dtype = "float32" if setting.device == "cpu" else "bfloat16"
    models.make(models.qwen3(small if setting.small else SHAPES["0.6B"]), dtype, setting.device, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(ROOT / "plugins/env_gsm8k/atropos_env_gsm8k/tiny" / name, folder)


def _python_of_trl() -> str | None:
    named = os.environ.get("TRL_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("trl") is not None else None)


async def _ours(setting: Setting, report: Report, scratch: Path, work: Loop, engine: str) -> dict[str, float]:
    """Run `atropos run` with bridge "ipc", strictly on-policy as TRL is, and return its figures."""
    on_cpu, run = setting.device == "cpu", scratch / engine
    (scratch / "digests.py").write_text(ENVIRONMENT.format(questions=work.questions()))
    (scratch / "run.toml").write_text('[transform.drop_flat]\nuse = "none"\n')  # TRL trains such groups too
    dtype = "float32" if on_cpu else "bfloat16"
    changes: dict[str, Any] = {
        "engine.devices": json.dumps([setting.device]), "trainer.devices": json.dumps([setting.device]),
        "engine.dtype": dtype, "trainer.dtype": dtype, "trainer.learning_rate": RATE, "trainer.gradient_checkpointing": "false",
        "training.groups_per_step": work.prompts, "training.group_size": work.group, "sampling.max_tokens": work.max_tokens,
        "evaluation.problems": 0, "checkpoint.every": 0,
    }  # fmt: skip
    if not on_cpu:
        changes |= {"engine.memory_share": work.vllm} if engine == "vllm" else {"engine.cuda_graphs": "true"}
    command = [
        "run", str(scratch / "run.toml"), "--env", f"{scratch}/digests.py:Digests", "--model", str(scratch / "model"),
        "--engine", engine, "--bridge", "ipc", "--steps", str(work.steps), "--seed", "1", "--dir", str(run),
        *(part for name, value in changes.items() for part in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    with _watched(setting) as memory:
        code, text = await ended(sys.executable, "-m", "atropos_core", *command, HF_HUB_OFFLINE="1")
    if code:
        raise RuntimeError(f"`atropos run` with engine {engine!r} ended with {code}:\n{text[-3000:]}\n{said(run)}")
    rows: list[dict[str, float]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > SKIP]
    copied = sum(row["bridge/bytes_copied"] for row in rows)
    report.holds(f'engine "{engine}": one copy of the weights, nothing copied', copied == 0, f"{copied:.0f} bytes")
    middle = {name: median(row[f"time/{name}"] for row in rows) for name in ("step_s", "waiting_s")}
    idle = {f"{who} idle": median(row[f"time/{who}_idle_share"] for row in rows) for who in ("trainer", "engine")}
    peak = json.loads((run / "summary.json").read_text())["peak_bytes"] if on_cpu else memory.peak_bytes
    tokens = median(row["tokens/sampled"] for row in rows)
    return figures_of(work, middle["step_s"], middle["waiting_s"], tokens, peak) | idle


async def _theirs(setting: Setting, scratch: Path, work: Loop, python: str, sampler: str) -> dict[str, float]:
    on_cpu = setting.device == "cpu"
    given = {
        "model": str(scratch / "model"), "problems": [(question, None) for question in work.questions()], "steps": work.steps,
        "skip": SKIP, "batch": work.batch, "prompts": work.prompts, "group": work.group, "max_tokens": work.max_tokens,
        "threads": len(os.sched_getaffinity(0)), "learning_rate": RATE, "device": setting.device,
        "dtype": "float32" if on_cpu else "bfloat16", "vllm": work.vllm if sampler == "vllm" else 0,
    }  # fmt: skip
    with _watched(setting) as memory:
        command = (python, str(ROOT / "benchmarks/trl_loop.py"), json.dumps(given))
        code, text = await ended(*command, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    answers = [line for line in text.splitlines() if line.startswith('{"trajectories_per_s"')]
    if code or not answers:
        raise RuntimeError(f"it ended with {code}: {text}")
    found: Mapping[str, float] = json.loads(answers[-1])
    step_s, sampling_s = found["step_s"], found["sampling_s"]
    peak = found["peak_bytes"] if on_cpu else memory.peak_bytes
    tokens = found["mean_tokens"] * work.rollouts
    idle = {"trainer idle": sampling_s / step_s, "engine idle": 1 - sampling_s / step_s}
    return figures_of(work, step_s, sampling_s, tokens, peak) | idle


def figures_of(work: Loop, step_s: float, sampling_s: float, tokens: float, peak_bytes: float) -> dict[str, float]:
    return {
        "trajectories/s": work.rollouts / step_s, "tokens/s, sampling": tokens / sampling_s,
        "tokens/s, update": tokens / (step_s - sampling_s), "tokens of a reply": tokens / work.rollouts, "peak, GB": peak_bytes / 1e9,
    }  # fmt: skip


@contextmanager
def _watched(setting: Setting) -> Iterator[Memory]:
    """On a GPU, follow what all processes have of its memory. On a CPU each run measures its own."""
    memory = Memory(setting.device)
    if setting.device == "cpu":
        yield memory
        return
    before = memory.used_bytes()
    with memory.watched():
        yield memory
    memory.peak_bytes -= before


def judge(report: Report, work: Loop, name: str, figures: Mapping[str, float]) -> None:
    for what, value in figures.items():
        report.note(f"{name}: {what}", value)
    shorter = 1 - figures["tokens of a reply"] / work.max_tokens
    report.at_most(f"{name}: replies shorter than {work.max_tokens} tokens by", shorter, SAME)
    report.at_least(f"{name}: memory", figures["peak, GB"], 0.01, "GB")


def compare(report: Report, ours: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> None:
    for mine, figures in ours.items():
        for other, beside in theirs.items():
            ratio = figures["trajectories/s"] / beside["trajectories/s"]
            report.note(f"{mine}: trajectories/s over {other} (the goal is {GOAL})", ratio, "times")
