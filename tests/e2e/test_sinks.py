"""The sinks of plugins in runs that are killed and resumed: each tells what metrics.jsonl tells."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish
from tests.wandb_records import history

RUN = """
model = "toy"
[training]
steps = 8
groups_per_step = 4
[evaluation]
problems = 4
every = 4
[checkpoint]
every = 3
[engine]
latency_s = 0.05
[environment.sevens]
use = "{sevens}"
[sink.csv]
[sink.tensorboard]
flush_s = 0.0
[sink.wandb]
mode = "offline"
"""


@pytest.fixture
def file(sevens: str, tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(RUN.format(sevens=tmp_path / "sevens.py:Sevens"))
    return str(tmp_path / "run.toml")


def table(run: Path) -> dict[int, dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as lines:
        return {
            int(row.pop("step")): {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(lines)
        }


def events(run: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            assert tag not in found.setdefault(event.step, {}), (tag, event.step)
            found[event.step][tag] = event.value
    return found


def services() -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if one.name().startswith("wandb-core")]


def test_a_killed_and_resumed_run_is_recorded_once_by_every_sink(file, tmp_path):
    before = {one.pid for one in services()}
    run = RunningRun(tmp_path / "run", "run", file, "--dir", str(tmp_path / "run"))
    run.wait_for_step(5)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.process.wait(60) == -signal.SIGKILL
    finish(tmp_path / "run", "resume", str(tmp_path / "run"))
    reported = {line.pop("step"): line for line in metrics_of(tmp_path / "run")}
    assert sorted(reported) == list(range(9))
    assert table(tmp_path / "run") == reported
    shown = events(tmp_path / "run")
    assert shown.keys() == reported.keys()
    for step, metrics in reported.items():
        assert shown[step] == {name: np.float32(value) for name, value in metrics.items()}, step
    folders = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({path.name.rpartition("-")[2] for path in folders}) == 1, "one id for both"
    kept = history(tmp_path / "run")  # W&B's service writes 32 kB at a time, and a kill takes what it had not written
    assert set(kept) >= set(range(4, 9)), "all that came after the resume"
    assert kept == {step: reported[step] for step in kept}
    left = [one for one in services() if one.pid not in before]
    psutil.wait_procs(left, 60)
    assert not [one for one in left if one.is_running()], "W&B's service ends with the run, also with a killed one"


def test_components_other_than_the_default_ones_are_said(sevens, atropos, tmp_path):
    flags = ("--env", "./sevens.py", "--model", "toy", "--steps", "1")
    one = atropos("run", *flags, "--dir", "one", "--set", "sink.csv.use=csv", "--reward", "length")
    said = " ".join(one.out.split())
    assert "sinks csv, console, jsonl" in said and "rewards length, environment" in said and "left out" not in said
    assert (tmp_path / "one/metrics.csv").is_file() and (tmp_path / "one/metrics.jsonl").is_file()
    out = ("--set", "sink.jsonl.use=none", "--set", "transform.drop_flat.use=none")
    less = atropos("run", *flags, "--dir", "less", *out, "--set", "sink.console.use=none")
    said = " ".join(less.out.split())
    assert "sinks none; left out: console, jsonl; no metrics.jsonl, no rollouts" in said
    assert "transforms group_advantage; left out: drop_flat" in said and not (tmp_path / "less/metrics.jsonl").exists()
    resumed = atropos("resume", "less", "--steps", "2")
    assert resumed.code == 0 and not (tmp_path / "less/metrics.jsonl").exists()
    assert "transforms group_advantage; left out: drop_flat" in " ".join(resumed.out.split())
    usual = atropos("run", *flags, "--dir", "usual", "--set", "sink.jsonl.rollouts_every=10")
    assert "sinks" not in usual.out


def test_a_run_without_them_is_the_same(file, atropos, tmp_path):
    """A sink sees a run and changes nothing of it."""
    text = Path(file).read_text()
    assert atropos("run", file, "--dir", "with", "--deterministic").code == 0
    (tmp_path / "run.toml").write_text(text[: text.index("[sink.csv]")])
    assert atropos("run", file, "--dir", "without", "--deterministic").code == 0
    one, other = (
        (tmp_path / name / "checkpoints/step-000008/policy/table.npy").read_bytes() for name in ("with", "without")
    )
    assert one == other
