"""What it costs to record a step's rollouts, and how much room they take: python -m benchmarks.recording

A real run of the tiny policy records every second step, so that steps with and without lie beside each other in one run. The loop
waits for what is written, and for the trainer's values of each token: both are in the time of the sink. One step of a million
tokens is recorded beside it, made up, to see what a token costs where there are many. Writes benchmarks/results/recording.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.builtin.config import JsonlOptions
from atropos_core.builtin.sinks import JsonlSink
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.training.batch import to_batch
from atropos_core.types import ScoredGroup
from atropos_records.rollout_records import RolloutRecords
from atropos_testing.samples import make_group
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import finish

MOST = 0.03  # of the time of a step
GROUPS, MEMBERS, LENGTH = 16, 8, 8192  # of the step that is made up


def of_a_run(folder: Path, steps: int) -> dict[str, Any]:
    finish(folder, "run", "--env", "gsm8k", "--dir", str(folder), "--steps", str(steps), "--seed", "1", "--set",
           "evaluation.problems=0", "--set", "sink.jsonl.rollouts_every=2", "--set", "checkpoint.every=0",
           deadline_s=3600)  # fmt: skip
    lines = metrics_of(folder)
    spent = {after["step"] - 1: after["time/sink/jsonl_s"] for after in lines if "time/sink/jsonl_s" in after}
    steady = {line["step"]: line["time/step_s"] for line in lines if 2 < line["step"] < steps}  # the first ones warm up
    recorded, without = ([step for step in steady if step % 2 == odd] for odd in (0, 1))
    sink_s = {name: median(spent[step] for step in of) for name, of in (("with", recorded), ("without", without))}
    step_s = median(steady.values())
    sizes = [(step.tokens.tokens, step.tokens_path.stat().st_size, step.path.stat().st_size) for step in _steps(folder)]
    tokens = sum(one[0] for one in sizes)
    return {
        "steps": steps,
        "step_s": step_s,
        "recording_ms": 1e3 * (sink_s["with"] - sink_s["without"]),
        "share": (sink_s["with"] - sink_s["without"]) / step_s,
        "step_ratio": median(steady[s] + spent[s] for s in recorded) / median(steady[s] + spent[s] for s in without),
        "tokens_a_step": tokens / len(sizes),
        "bytes_a_token": sum(one[1] for one in sizes) / tokens,
        "text_bytes_a_token": sum(one[2] for one in sizes) / tokens,
    }


def _steps(folder: Path) -> list[Any]:
    records = RolloutRecords(folder)
    return [records.step(step) for step in records.steps()]


def long_group(number: int) -> ScoredGroup:
    group = make_group(number, list(range(MEMBERS)))
    draw = np.random.default_rng(number)
    episodes = []
    for episode in group.episodes:
        sampled = np.arange(LENGTH) >= LENGTH // 8
        rollout = replace(
            episode.rollouts[0], tokens=draw.integers(0, 30_000, LENGTH).astype(np.int32), sampled=sampled, trained=sampled,
            logprobs=np.where(sampled, -draw.random(LENGTH), 0).astype(np.float32), policy_version=np.zeros(LENGTH, np.int32),
        )  # fmt: skip
        text = {"role": "assistant", "content": "word " * (LENGTH // 2)}
        episodes.append(replace(episode, rollouts=(rollout,), messages=(*episode.messages[:1], text)))
    return replace(group, episodes=tuple(episodes)).with_advantages(np.linspace(-1, 1, MEMBERS))


async def of_a_million(folder: Path) -> dict[str, Any]:
    groups = [long_group(number) for number in range(GROUPS)]
    batch = to_batch(groups, 1)
    values = dict.fromkeys(("advantages", "trainer_logprobs", "entropy"), batch.advantages)
    size = MEMBERS * LENGTH
    settled = [SettledGroup(group, "trained", batch_start=n * size) for n, group in enumerate(groups)]
    sink = JsonlSink(JsonlOptions(), folder)
    await sink.open()
    taken = []
    for step in range(1, 6):
        began = time.perf_counter()
        await sink.record(StepRecord(step, {}, groups, settled, values))
        taken.append(time.perf_counter() - began)
    await sink.close()
    (written,) = {path.stat().st_size for path in (folder / "rollouts").glob("*.safetensors")}
    tokens = len(batch.tokens)
    return {"tokens": tokens, "recording_ms": 1e3 * median(taken), "bytes_a_token": written / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the tiny run")
    chosen = parser.parse_args()
    about = described()
    with tempfile.TemporaryDirectory(prefix="atropos-recording-") as scratch:
        run = of_a_run(Path(scratch) / "run", chosen.steps)
        (Path(scratch) / "made-up").mkdir()
        million = asyncio.run(of_a_million(Path(scratch) / "made-up"))
    console.table(
        ("what", "a step", "recording", "of a step", "tokens", "bytes a token"),
        [
            ("tiny run", f"{run['step_s']:.3f} s", f"{run['recording_ms']:.1f} ms", f"{run['share']:.2%}",
             f"{run['tokens_a_step']:,.0f}", f"{run['bytes_a_token']:.1f} and {run['text_bytes_a_token']:.1f} of text"),
            ("made up", "", f"{million['recording_ms']:.0f} ms", "", f"{million['tokens']:,}", f"{million['bytes_a_token']:.1f}"),
        ],
    )  # fmt: skip
    console.say(f"a recorded step takes {run['step_ratio']:.3f} times as long as one that is not, in the same run")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "recording.json").write_text(json.dumps({**about, "run": run, "made_up": million}, indent=1) + "\n")
    if run["share"] > MOST:
        raise SystemExit(f"recording takes more than {MOST:.0%} of a step")


if __name__ == "__main__":
    main()
