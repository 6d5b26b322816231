"""Runs over `--bridge lora`, `checkpoint` and `nccl`: they learn, leave nothing behind, and outlive kill -9."""

from __future__ import annotations

import re
import signal
import tomllib
from pathlib import Path

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import QUICK, RunningRun, finish

pytestmark = pytest.mark.slow

BRIDGES = {
    "lora": (
        "--bridge",
        "lora",
        "--set",
        "trainer.lora.rank=8",
        "--set",
        'trainer.lora.targets=["q_proj","down_proj"]',
    ),
    "checkpoint": ("--bridge", "checkpoint"),
    "nccl": ("--bridge", "nccl"),
}
TRAVELS = {"lora": "adapters", "checkpoint": "published"}  # where, while a run goes on; "nccl" needs no disk
SAVED = {"lora": "adapter_model.safetensors", "checkpoint": "model.safetensors", "nccl": "model.safetensors"}


def policy(folder: Path, bridge: str) -> bytes:
    return (folder / "checkpoints/step-000009/policy" / SAVED[bridge]).read_bytes()


class Uninterrupted(dict[str, Path]):
    """A whole run over each bridge, once a test asks for it."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._tmp_path_factory = tmp_path_factory

    def __missing__(self, bridge: str) -> Path:
        self[bridge] = folder = self._tmp_path_factory.mktemp(bridge) / "run"
        finish(folder, "run", "--engine", "hf", *BRIDGES[bridge], "--dir", str(folder), *QUICK)
        return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory)


@pytest.mark.parametrize("bridge", BRIDGES)
def test_engine_and_trainer_agree_at_every_step_and_nothing_is_left(bridge, uninterrupted, atropos):
    folder = uninterrupted[bridge]
    lines = metrics_of(folder)
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
    assert lines[-1]["policy/probe_shift_nats"] > 0.5
    least = min(line["bridge/bytes_on_disk"] for line in lines[1:] if "step/skipped" not in line)
    assert least > 10_000 if bridge in TRAVELS else least == 0
    assert {path.name for path in folder.iterdir()} >= {"checkpoints", "config.toml", "metrics.jsonl"}
    assert not (folder / TRAVELS.get(bridge, "nccl")).exists()
    assert not [path for path in folder.rglob("*") if path.name.endswith(".partial")]
    ended = atropos("eval", str(folder), "--out", "problems.jsonl")
    assert ended.code == 0, ended.err
    accuracy = float(re.search(r"^ ?accuracy +(\S+)", ended.out, re.M)[1])
    assert accuracy == pytest.approx(lines[-1]["eval/accuracy"], abs=1e-9)


def test_a_broadcast_trains_what_checkpoints_on_disk_train_bit_for_bit(uninterrupted):
    assert policy(uninterrupted["nccl"], "nccl") == policy(uninterrupted["checkpoint"], "checkpoint")


def test_the_saved_run_file_has_the_options_of_the_adapter(uninterrupted):
    saved = tomllib.loads((uninterrupted["lora"] / "config.toml").read_text())
    assert saved["trainer"]["lora"] == {"rank": 8, "alpha": 32.0, "dropout": 0.0, "targets": ["q_proj", "down_proj"]}
    assert "10 times trainer.learning_rate, since LoRA trains an adapter" in " ".join(
        uninterrupted["lora"].with_name("run.out").read_text().split()
    )
    names = {path.name for path in (uninterrupted["lora"] / "checkpoints/step-000009/policy").iterdir()}
    assert "model.safetensors" not in names


@pytest.mark.parametrize(
    ("bridge", "role"),
    [
        pytest.param("lora", "trainer", marks=pytest.mark.long),
        ("lora", "supervisor"),
        ("checkpoint", "engine"),
        pytest.param("checkpoint", "supervisor", marks=pytest.mark.long),
        ("nccl", "engine"),
        pytest.param("nccl", "trainer", marks=pytest.mark.long),
        pytest.param("nccl", "supervisor", marks=pytest.mark.long),
    ],
)
def test_a_killed_process_ends_the_run_and_resume_reaches_the_same_bits(bridge, role, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--engine", "hf", *BRIDGES[bridge], "--dir", str(folder), *QUICK)
    run.wait_for_step(5)
    run.kill(role)
    code = run.ended_within(60)
    travelling = folder / TRAVELS.get(bridge, "nccl")
    if role == "supervisor":
        assert code == -signal.SIGKILL
        assert travelling.exists() is (bridge in TRAVELS)  # it had no time to tidy up
    else:
        assert code == 1
        assert f"ProcessDied {role} (pid {run.children[role].pid}) was killed by SIGKILL" in run.text
        assert not travelling.exists()
    finish(folder, "resume", str(folder))
    assert policy(folder, bridge) == policy(uninterrupted[bridge], bridge)
    assert not travelling.exists()


def test_lora_over_a_bridge_that_moves_whole_models_says_what_to_type(atropos):
    ended = atropos("run", "--env", "gsm8k", "--bridge", "checkpoint", "--set", "trainer.lora.rank=8")
    assert ended.code == 2
    assert "Use --bridge lora." in ended.err
    ended = atropos("run", "--env", "gsm8k", "--bridge", "lora", "--set", "trainer.lora.rnk=8")
    assert ended.code == 2
    assert "Did you mean 'rank'?" in ended.err
