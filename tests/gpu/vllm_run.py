"""`atropos run` with engine "vllm" over bridge "ipc", as a user types it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.pair import Setting
from tests.gpu.report import Report
from tests.gpu.vllm_updates import said

OF_RUNS = ("pydantic", "pluggy", "typer", "rich", "psutil", "aiohttp")  # what `atropos run` needs
ENDS_S = 15.0  # after SIGTERM
GAIN = 5.0  # points of accuracy in 16 steps; tests/vllm/test_runs.py expects 15 of the same run on a CPU


async def runs(setting: Setting, report: Report) -> None:
    """The tiny policy on gsm8k: alignment at every step, nothing copied, and that it learns; 3 steps of 16 rollouts in the small form, in
    which what is learned says nothing."""
    on_cpu = setting.device == "cpu"
    devices, dtype = json.dumps([setting.device]), "float32" if on_cpu else "bfloat16"
    small = ("training.groups_per_step=4", "training.group_size=4", "evaluation.problems=16")
    changes = (
        f"engine.devices={devices}", f"trainer.devices={devices}", f"engine.dtype={dtype}", f"trainer.dtype={dtype}",
        *(small if setting.small else ("evaluation.problems=128",)), *(() if on_cpu else ("engine.memory_share=0.3",)),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [
            "run", "--engine", "vllm", "--bridge", "ipc", "--env", "gsm8k", "--steps", "3" if setting.small else "16",
            "--dir", str(folder), *(part for change in changes for part in ("--set", change)),
        ]  # fmt: skip
        began = time.perf_counter()
        code, text = await ended(sys.executable, "-m", "atropos_core", *command)
        report.holds("exit code", code == 0, str(code))
        report.note("seconds, start and end included", time.perf_counter() - began, "s")
        if code:
            report.note("what it said", f"{text[-3000:]}\n{said(folder)}")
            return
        lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    bound = 1e-4 if on_cpu else 0.5
    report.at_most(
        "alignment, worst step", max(line["alignment/max_abs_logprob_diff"] for line in lines), bound, "nats"
    )
    copied = sum(line["bridge/bytes_copied"] for line in lines)
    report.holds("nothing copied", copied == 0, f"{copied:.0f} bytes")
    first, last = (100 * line["eval/accuracy"] for line in (lines[0], lines[-1]))
    report.note("accuracy, before and after", [first, last], "%")
    if not setting.small:
        report.at_least("accuracy gained", last - first, GAIN, "points")
    report.note("a step, the last one", lines[-1].get("time/step_s"), "s")


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
