"""Is there one copy of the weights? PSS of all processes of a run with a random model of 500 MB.

    python -m benchmarks.memory

PSS counts a page that two processes map as half in each, so a sum over processes counts it once. Two runs are watched,
one with the tiny policy and one with a large random model of the same architecture; their difference is what the large
one's weights, gradients, optimiser and activations take, with interpreters and libraries cancelled out. Writes
benchmarks/results/memory.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from atropos_core import console
from benchmarks.machine import RESULTS, described

LAYERS, HIDDEN, INTERMEDIATE = 12, 1024, 2304
DEADLINE_S = 300


def make_model(directory: Path, tiny: Path, layers: int = LAYERS) -> int:
    """A random Qwen3 with the tiny policy's tokenizer, float32. Returns the bytes of its weights."""
    code = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0); "
        "c = AutoConfig.from_pretrained(sys.argv[1]); "
        f"c.update(dict(hidden_size={HIDDEN}, intermediate_size={INTERMEDIATE}, num_hidden_layers={layers}, "
        f"num_attention_heads=8, num_key_value_heads=4, head_dim=128, layer_types=['full_attention'] * {layers})); "
        "m = AutoModelForCausalLM.from_config(c, dtype=torch.float32); m.save_pretrained(sys.argv[2]); "
        "print(sum(p.numel() * p.element_size() for p in m.parameters()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tiny), str(directory)], capture_output=True, text=True, check=True
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (tiny / name).exists():
            shutil.copy(tiny / name, directory / name)
    return int(ended.stdout.split()[-1])


def pss(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def watch(model: Path, folder: Path) -> dict[str, int]:
    """PSS over all processes, bytes: just before the first step (weights only), and at its highest while training."""
    run = folder / f"run-{model.name}"
    flat = folder / "flat.toml"  # a random model is never right: it is trained on the lengths of its replies
    flat.write_text(
        '[transform.drop_flat]\nuse = "none"\n[reward.environment]\nuse = "none"\n[reward.length]\nfree_tokens = 0\nlimit_tokens = 48\n'
    )
    process = subprocess.Popen(
        [
            sys.executable, "-m", "atropos_core", "run", str(flat), "--model", str(model), "--env", "gsm8k", "--dir", str(run),
            "--steps", "3", "--set", "training.groups_per_step=2", "--set", "training.group_size=8",
            "--set", "sampling.max_tokens=48", "--set", "evaluation.problems=4", "--set", "checkpoint.every=0",
            "--set", "engine.threads=1", "--set", "trainer.threads=1",
        ],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    supervisor = psutil.Process(process.pid)
    metrics = run / "metrics.jsonl"
    loaded = highest = 0
    until = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < until:
        try:
            total = sum(pss(one) for one in [supervisor, *supervisor.children(recursive=True)])
        except psutil.NoSuchProcess:
            break
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if metrics.exists() and lines <= 1:
            loaded = min(loaded or total, total)  # attached and not trained; the least, when no activation is kept
        if lines >= 2:
            highest = max(highest, total)
        time.sleep(0.02)
    if process.wait(DEADLINE_S) != 0:
        raise SystemExit(f"the run of {model} ended with {process.returncode}")
    return {"loaded": loaded, "training": highest}


def main() -> None:
    from atropos_env_gsm8k.plugin import HERE

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        weights = make_model(folder / "large", HERE / "tiny")
        small, large = watch(HERE / "tiny", folder), watch(folder / "large", folder)
    copies = (large["loaded"] - small["loaded"]) / weights
    trained = (large["training"] - small["training"]) / weights
    console.table(
        ("", "MB", "copies of the weights"),
        [
            ("weights of the large model", f"{weights / 1e6:.0f}", "1.00"),
            (
                "PSS of all processes, loaded and attached, less the tiny run's",
                f"{copies * weights / 1e6:.0f}",
                f"{copies:.2f}",
            ),
            (
                "PSS at its highest while training, less the tiny run's",
                f"{trained * weights / 1e6:.0f}",
                f"{trained:.2f}",
            ),
            ("  of which the weights, their gradients and AdamW's two moments", f"{4 * weights / 1e6:.0f}", "4.00"),
            ("  of which activations, keys and values", f"{(trained - 4) * weights / 1e6:.0f}", f"{trained - 4:.2f}"),
        ],
    )
    RESULTS.mkdir(exist_ok=True)
    figures = {
        "machine": described(),
        "weights": weights,
        "tiny": small,
        "large": large,
        "copies_loaded": copies,
        "copies_training": trained,
    }
    (RESULTS / "memory.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
