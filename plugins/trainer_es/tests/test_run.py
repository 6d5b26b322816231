"""A whole run: a separate engine samples from each member, and its logprobs agree with the trainer's."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import metrics_of
from tests.e2e.runs import finish

pytestmark = pytest.mark.slow

RUN = (
    "run", "--env", "gsm8k", "--trainer", "es", "--bridge", "checkpoint", "--set", "transform.group_advantage.baseline=none",
    "--set", "transform.drop_flat.use=none",
    "--set", "trainer.population=2", "--set", "trainer.parameters=norm", "--set", "trainer.sigma=0.02",
    "--set", "trainer.learning_rate=0.02", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=8",
    "--set", "training.group_size=2", "--set", "checkpoint.every=3",
)  # fmt: skip


def test_a_run_samples_from_one_member_after_another_and_ends_with_the_policy(tmp_path):
    folder = tmp_path / "run"
    finish(folder, *RUN, "--steps", "6", "--dir", str(folder))
    lines = metrics_of(folder)
    assert [line["es/member"] for line in lines] == [0, 1, 2, 0, 1, 2]
    assert all(line["alignment/max_abs_logprob_diff"] < 1e-4 for line in lines), "of the member that was just written"
    assert all(line["alignment/unchecked_share"] == 0 and line["alignment/fresh_tokens"] > 0 for line in lines)
    assert all(line["es/reward"] == pytest.approx(line["reward/mean"]) for line in lines)
    first, last = (load_file(folder / f"checkpoints/step-{step:06d}/policy/model.safetensors") for step in (3, 6))
    moved = any(not torch.equal(first[name], last[name]) for name in first)
    assert moved == (lines[4]["es/reward"] != lines[5]["es/reward"])
