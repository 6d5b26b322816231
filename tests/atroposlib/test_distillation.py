"""An unmodified environment that sends a teacher's columns, through our server into a run that learns from them alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.atroposlib.processes import TINY, OurServer
from tests.atroposlib.scripted import ScriptedServer
from tests.atroposlib.test_clients import environment
from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun

pytestmark = pytest.mark.slow


def test_columns_of_an_old_environment_are_what_the_policy_learns(
    our_server: Callable[..., OurServer], model: ScriptedServer, tmp_path: Path
) -> None:
    server = our_server("--model", str(TINY))
    folder = tmp_path / "run"
    run = RunningRun(
        folder, "train", "--api", server.url, "--model", "tiny", "--steps", "4", "--dir", str(folder),
        "--set", "training.groups_per_step=2", "--set", "training.group_size=4", "--set", "evaluation.problems=0",
        "--set", "trainer.distillation.alone=true", "--set", "trainer.learning_rate=1e-3",
        "--set", "trainer.warmup_steps=0", "--set", "training.max_staleness=4",  # it sends ahead, and ends with the third step
    )  # fmt: skip
    worker = environment(tmp_path, "taught", server.url, model, steps=4)
    assert run.process.wait(150) == 0, run.text + worker.text
    assert worker.ended_within(60) == 0, worker.text
    lines = metrics_of(folder)
    assert len(lines) >= 4
    learned = [line["distill/kl"] for line in lines if "distill/kl" in line]
    assert len(learned) == 4 and learned[-1] < 0.8 * learned[0], learned
    assert all(line["distill/positions"] == 1.0 for line in lines if "distill/kl" in line)
    assert all(abs(line["distill/coverage"] - 0.990) < 1e-3 for line in lines if "distill/kl" in line)
