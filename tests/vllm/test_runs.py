"""`atropos run --engine vllm` as a user types it: it learns, engines may be several, a skipped publish is found."""

from __future__ import annotations

import pytest

from tests.conftest import metrics_of, plant
from tests.e2e.test_tiny_run import PLANTED
from tests.vllm.learning import learns

pytestmark = pytest.mark.timeout(400)

VLLM = ("--engine", "vllm", "--env", "gsm8k")
SMALL = (
    *VLLM, "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "evaluation.problems=8",
    "--set", "checkpoint.every=2", "--set", "engine.enforce_eager=true",
)  # fmt: skip


def test_the_tiny_policy_learns_over_ipc_and_leaves_nothing(tmp_path):
    """Over ipc, compiled, as a user's first run; `make soak` has it over every bridge."""
    found = learns("ipc", 16, tmp_path / "run")
    assert found.code == 0, found.text
    assert found.points >= 15, found.text
    assert found.worst_alignment <= 1e-4
    assert found.bytes_copied == {0.0}
    assert found.leaves_nothing, found


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
        "--set",
        "engine.enable_sleep_mode=true",
        timeout=300,
    )
    assert ended.code == 0, ended.out + ended.err
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["step"] == 4
    assert all(line["bridge/bytes_copied"] > 3e6 for line in lines[1:])
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4, "tokens of both"
    for log in (tmp_path / "run/logs").glob("engine*.vllm.log"):
        assert log.read_text().count("to discard tags {'kv_cache'}") == 5, (
            "each sleeps after the first evaluation and during each update"
        )
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


def test_a_teacher_on_vllm_tells_a_run_what_the_same_teacher_on_transformers_does(atropos, tmp_path):
    by_engine = {}
    for engine in ("hf", "vllm"):
        ended = atropos(
            "run", "--env", "gsm8k", "--deterministic", "--steps", "2", "--dir", engine, "--set", "evaluation.problems=8",
            "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
            "--set", "teacher.big.use=distillation", "--set", "teacher.big.model=tiny-teacher", "--set", "teacher.big.top_k=8",
            "--set", f"teacher.big.engine.use={engine}", "--set", "trainer.distillation.alone=true",
            *(("--set", "teacher.big.engine.enable_sleep_mode=true") if engine == "vllm" else ()), timeout=200,
        )  # fmt: skip
        assert ended.code == 0, ended.out + ended.err
        by_engine[engine] = metrics_of(tmp_path / engine)[1:]
    logs = [log.read_text() for log in (tmp_path / "vllm/logs").glob("*teacher-big*")]
    assert any("vLLM" in log for log in logs)
    assert sum(log.count("to discard tags {'kv_cache'}") for log in logs) == 2, "it sleeps after each step"
    for line, other in zip(by_engine["vllm"], by_engine["hf"], strict=True):
        assert line["distill/positions"] == other["distill/positions"] == 1.0
        assert line["distill/kl"] == pytest.approx(other["distill/kl"], abs=1e-3)
        assert line["distill/coverage"] == pytest.approx(other["distill/coverage"], abs=1e-3)
