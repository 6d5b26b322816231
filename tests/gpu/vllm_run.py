"""`atropos run` with engine "vllm" over bridge "ipc", as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.gpu.pair import Setting
from tests.gpu.report import Report
from tests.gpu.vllm_updates import said

OF_RUNS = ("pydantic", "pluggy", "typer", "rich", "psutil", "aiohttp")  # what `atropos run` needs
ENDS_S = 15.0  # after SIGTERM
GAIN = 5.0  # points of accuracy in 16 steps; tests/vllm/test_runs.py expects 15 of the same run on a CPU
Kind = Literal["plain", "fp8", "ngram"]
FP8 = ('engine.extra_args=["--quantization", "fp8"]',)
CORRECTED = ("trainer.old_logprobs=recompute", "trainer.correction.kind=tis", "training.max_logprob_diff=10")
NGRAM = ("engine.speculation=ngram",)


async def runs(setting: Setting, report: Report, kind: Kind = "plain") -> None:
    """The tiny policy on gsm8k: alignment at every step, nothing copied, and that it learns; 3 steps of 16 rollouts in the small form, in
    which what is learned says nothing. "fp8": the engine rounds its weights to 8 bits, and the trainer corrects for that. "ngram": vLLM
    proposes tokens by what followed the same tokens earlier."""
    on_cpu = setting.device == "cpu"
    devices, dtype = json.dumps([setting.device]), "float32" if on_cpu else "bfloat16"
    small = ("training.groups_per_step=4", "training.group_size=4", "evaluation.problems=16")
    changes = (
        f"engine.devices={devices}", f"trainer.devices={devices}", f"engine.dtype={dtype}", f"trainer.dtype={dtype}",
        *(small if setting.small else ("evaluation.problems=128",)), *(() if on_cpu else ("engine.memory_share=0.3",)),
        *({"plain": (), "fp8": (*(() if on_cpu else FP8), *CORRECTED), "ngram": NGRAM}[kind]),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        lines = await trained(
            report, Path(scratch) / "run", "--engine", "vllm", "--bridge", "ipc", "--env", "gsm8k", "--steps",
            "3" if setting.small else "16", *(part for change in changes for part in ("--set", change)),
        )  # fmt: skip
    if lines:
        judge(setting, report, lines, kind)


def judge(setting: Setting, report: Report, lines: Sequence[Mapping[str, Any]], kind: Kind) -> None:
    differences = [line["alignment/max_abs_logprob_diff"] for line in lines]
    if kind == "fp8":
        report.note("alignment, worst step", max(differences), "nats")
        gaps, cut = ([line[f"correction/{name}"] for line in lines if line["step"]] for name in ("gap", "fraction"))
        if setting.device != "cpu":  # without rounding, engine and trainer differ by less; vLLM does not round on a CPU
            report.at_least("mean |log ρ| of sampled tokens, least step", float(np.min(gaps)), 1e-4, "nats")
        report.at_most("mean |log ρ| of sampled tokens, worst step", float(np.max(gaps)), 0.5, "nats")
        report.note("tokens cut by the correction, worst step", 100 * max(cut), "%")
    else:
        bound = 1e-4 if setting.device == "cpu" else 0.5
        report.at_most("alignment, worst step", float(np.max(differences)), bound, "nats")
        copied = sum(line["bridge/bytes_copied"] for line in lines)
        report.holds("nothing copied", copied == 0, f"{copied:.0f} bytes")
    if kind == "ngram":
        accepted = [line["engine/draft_acceptance"] for line in lines if "engine/draft_acceptance" in line]
        report.at_least("steps with accepted proposals", sum(one > 0 for one in accepted), 1)
        report.note("proposed tokens that were accepted, last step", 100 * accepted[-1] if accepted else None, "%")
    first, last = (100 * line["eval/accuracy"] for line in (lines[0], lines[-1]))
    report.note("accuracy, before and after", [first, last], "%")
    if not setting.small:
        report.at_least("accuracy gained", last - first, GAIN, "points")
    report.note("a step, the last one", lines[-1].get("time/step_s"), "s")


async def trained(report: Report, folder: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """`atropos run ARGUMENTS` in this folder. Returns the lines of its metrics, or none if it failed."""
    began = time.perf_counter()
    command = (sys.executable, "-m", "atropos_core", "run", *arguments, "--dir", str(folder))
    code, text = await ended(*command, **variables)
    report.holds("exit code", code == 0, str(code))
    report.note("seconds, start and end included", time.perf_counter() - began, "s")
    if code:
        report.note("what it said", f"{text[-3000:]}\n{said(folder)}")
        return []
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def ended(*command: str, **variables: str) -> tuple[int, str]:
    """Return the code and the output of a command. If the check is given up, the command is ended in order, then killed."""
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **variables}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), ENDS_S)
            except TimeoutError:
                process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace")
