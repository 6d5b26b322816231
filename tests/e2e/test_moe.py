"""Runs of a tiny mixture of experts: the engine samples from the trainer's weights over each bridge, and a killed run resumes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish, weights
from tests.moe import ENVIRONMENT, make_moe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("moe")
    (folder / "letters.py").write_text(ENVIRONMENT)
    return (
        "run", "--model", str(make_moe(folder / "model")), "--env", f"{folder}/letters.py:Letters", "--engine", "hf",
        "--deterministic", "--steps", str(STEPS), "--set", "training.groups_per_step=2", "--set", "training.group_size=4",
        "--set", "sampling.max_tokens=24", "--set", "checkpoint.every=1", "--set", "evaluation.problems=0",
        "--set", "trainer.learning_rate=0.003",
    )  # fmt: skip


def check(folder: Path) -> None:
    lines = metrics_of(folder)
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines if "step/skipped" not in line) <= 1e-4
    assert lines[-1]["policy/version"] == STEPS
    assert lines[-1]["policy/probe_shift_nats"] > 0.01


@pytest.mark.parametrize("replay", ["false", "true"])
def test_a_killed_run_of_experts_resumes_to_the_same_bits(
    replay: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = (*arguments, "--bridge", "checkpoint", "--set", f"trainer.router_replay={replay}")
    finish(tmp_path / "whole", *arguments, "--dir", str(tmp_path / "whole"))
    check(tmp_path / "whole")
    run = RunningRun(tmp_path / "run", *arguments, "--dir", str(tmp_path / "run"))
    run.wait_for_step(2)
    run.kill("trainer")
    run.kill("supervisor")
    assert run.process.wait(60) == -signal.SIGKILL
    finish(tmp_path / "run", "resume", str(tmp_path / "run"))
    assert weights(tmp_path / "run", STEPS) == weights(tmp_path / "whole", STEPS)


def test_replay_halves_what_other_experts_do_to_logprobs_in_bfloat16(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Engine and trainer hold the same weights and round differently. Where they choose other experts, logprobs are far apart."""
    model = make_moe(tmp_path / "model", num_experts=32, num_experts_per_tok=4, num_hidden_layers=6, gain=12.0)
    found = {}
    for replay in ("false", "true"):
        finish(
            tmp_path / replay, *arguments, "--model", str(model), "--bridge", "checkpoint", "--dir", str(tmp_path / replay),
            "--set", f"trainer.router_replay={replay}", "--set", "engine.dtype=bfloat16", "--set", "trainer.dtype=bfloat16",
            "--set", "training.max_logprob_diff=100",
        )  # fmt: skip
        found[replay] = metrics_of(tmp_path / replay)[0]
    without, replayed = (found[replay]["alignment/mean_abs_logprob_diff"] for replay in ("false", "true"))
    print(f"mean difference without replay {without:.4f}, with replay {replayed:.4f} nats")
    assert replayed < 0.75 * without
    assert found["true"]["router/replayed_share"] == 1.0
    assert 0.9 < found["true"]["router/agreement"] < 1.0


@pytest.mark.parametrize("bridge", ["delta", "nccl", "lora"])
def test_experts_travel_over_every_bridge(bridge: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    finish(tmp_path / "run", *arguments, "--bridge", bridge, "--dir", str(tmp_path / "run"))
    check(tmp_path / "run")
