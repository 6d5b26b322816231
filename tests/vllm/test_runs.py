"""`atropos run --engine vllm` as a user types it: every bridge learns, engines may be several, a skipped publish is found."""

from __future__ import annotations

import pytest

from tests.conftest import metrics_of, plant
from tests.e2e.runs import RunningRun
from tests.e2e.test_tiny_run import PLANTED
from tests.vllm.processes import left, segments, still_running

pytestmark = pytest.mark.timeout(400)

STEPS = 16
VLLM = ("--engine", "vllm", "--env", "gsm8k")
SMALL = (
    *VLLM, "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "evaluation.problems=8",
    "--set", "checkpoint.every=2", "--set", "engine.enforce_eager=true",
)  # fmt: skip


@pytest.mark.parametrize("bridge", ["ipc", "lora", "checkpoint"])
def test_the_tiny_policy_learns_over_each_bridge_and_leaves_nothing(bridge, tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(
        folder, "run", *VLLM, "--bridge", bridge, "--steps", str(STEPS), "--dir", str(folder),
        "--set", "evaluation.problems=128", *(() if bridge == "ipc" else ("--set", "engine.enforce_eager=true")),
    )  # fmt: skip
    run.wait_for_step(2, 240)
    everyone = run.supervisor.children(recursive=True)
    held = segments(everyone)
    assert run.process.wait(240) == 0, run.text
    lines = metrics_of(folder)
    assert 100 * (lines[-1]["eval/accuracy"] - lines[0]["eval/accuracy"]) >= 15, run.text
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
    if bridge == "ipc":
        assert {line["bridge/bytes_copied"] for line in lines} == {0.0}
    assert not still_running(everyone, 2)
    assert not left(held)
    stays = {path.name for path in folder.iterdir()}
    assert stays == {"checkpoints", "logs", "rollouts", "config.toml", "lock", "metrics.jsonl", "summary.json"}


def test_a_run_over_two_engines_shares_with_one_and_copies_to_the_other(atropos, tmp_path):
    ended = atropos(
        "run",
        *SMALL,
        "--bridge",
        "ipc",
        "--steps",
        "4",
        "--dir",
        "run",
        "--set",
        "engine.replica.second={}",
        timeout=300,
    )
    assert ended.code == 0, ended.out + ended.err
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["step"] == 4
    assert all(line["bridge/bytes_copied"] > 3e6 for line in lines[1:])
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4, "tokens of both"
    for name in ("engine", "engine-second"):
        assert list((tmp_path / "run/logs").glob(f"*{name}*")), "each has a log of its own"


def test_a_run_whose_publish_is_skipped_stops_with_the_named_error(atropos, tmp_path):
    plant(tmp_path, "forgetful", PLANTED)
    ended = atropos(
        "run", "--bridge", "forgetful", *SMALL, "--steps", "20", "--dir", "run", PYTHONPATH=str(tmp_path), timeout=200
    )
    assert ended.code == 1
    assert "Misaligned" in ended.err
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2, "found at the first step after the first update"
