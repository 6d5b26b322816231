"""A run whose engine samples in another precision than its trainer scores in corrects for it by itself."""

from __future__ import annotations

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import finish

pytestmark = pytest.mark.slow

SHORT = (
    "run", "--env", "gsm8k", "--bridge", "lora", "--steps", "2", "--set", "evaluation.problems=0",
    "--set", "training.groups_per_step=2", "--set", "training.group_size=4", "--set", "training.max_logprob_diff=0.5",
)  # fmt: skip


@pytest.mark.parametrize(("engine", "corrected"), [("float16", True), ("float32", False)])
def test_a_run_corrects_for_an_engine_of_fewer_bits_and_for_no_other(tmp_path, engine, corrected):
    folder = tmp_path / "run"
    finish(folder, *SHORT, "--dir", str(folder), "--set", f"engine.dtype={engine}")
    trained = [line for line in metrics_of(folder) if "loss" in line]  # a step of flat groups alone has no update
    assert trained
    for line in trained:
        assert ("correction/gap" in line) is corrected
        if corrected:
            assert 0 < line["correction/gap"] < 0.5
            assert line["correction/fraction"] == 0, "rounding does not double a probability"
