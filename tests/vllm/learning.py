"""A run of the tiny policy over a real vLLM and one bridge, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun
from tests.vllm.processes import left, segments, still_running

KEPT = {"checkpoints", "logs", "rollouts", "config.toml", "lock", "metrics.jsonl", "paths.json", "summary.json"}
SAID = {"health.jsonl"}  # where a check of health had something to say, as one of speed may on a busy machine


@dataclass(frozen=True)
class Learned:
    code: int
    text: str
    points: float  # of accuracy, from before the first step to after the last
    worst_alignment: float  # nats, over all steps
    bytes_copied: set[float]  # by the bridge, at each step
    alive: int  # processes, two seconds after the end
    segments_left: set[str]
    files: set[str]  # in the run's folder

    @property
    def leaves_nothing(self) -> bool:
        return not self.alive and not self.segments_left and self.files - SAID == KEPT


def learns(bridge: str, steps: int, folder: Path) -> Learned:
    """`atropos run --engine vllm --env gsm8k --bridge BRIDGE` to its end. ipc compiles, as a user's run does; others don't."""
    run = RunningRun(
        folder, "run", "--engine", "vllm", "--env", "gsm8k", "--bridge", bridge, "--steps", str(steps), "--dir", str(folder),
        "--set", "evaluation.problems=128", *(() if bridge == "ipc" else ("--set", "engine.enforce_eager=true")),
    )  # fmt: skip
    run.wait_for_step(2, 240)
    everyone = run.supervisor.children(recursive=True)
    segments_before = segments(everyone)
    code = run.process.wait(240)
    lines = metrics_of(folder)
    return Learned(
        code=code,
        text=run.text,
        points=100 * (lines[-1].get("eval/accuracy", 0.0) - lines[0]["eval/accuracy"]),
        worst_alignment=max(line["alignment/max_abs_logprob_diff"] for line in lines),
        bytes_copied={line["bridge/bytes_copied"] for line in lines},
        alive=len(still_running(everyone, 2)),
        segments_left=left(segments_before),
        files={path.name for path in folder.iterdir()},
    )
