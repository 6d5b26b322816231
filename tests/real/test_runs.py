"""Two bridges train the real model for two steps: what the engine samples from is what the trainer has."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ended, metrics_of

VOWELS = f"{Path(__file__).parent / 'vowels.py'}:Vowels"
SMALL = (
    "--engine", "hf", "--steps", "2", "--set", "training.groups_per_step=2", "--set", "training.group_size=2",
    "--set", "sampling.max_tokens=8", "--set", "evaluation.problems=1", "--set", "trainer.learning_rate=1e-5",
    "--set", "checkpoint.every=0", "--set", "trainer.tokens_per_microbatch=256",
)  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize("bridge", ["ipc", "lora"])
def test_a_bridge_publishes_what_was_trained(
    model: Path, tmp_path: Path, atropos: Callable[..., Ended], bridge: str
) -> None:
    ended = atropos(
        "run", "--model", str(model), "--env", VOWELS, "--bridge", bridge, "--dir", "run", *SMALL, timeout=380
    )
    assert ended.code == 0, ended.err
    lines = [
        line for line in metrics_of(tmp_path / "run") if "loss" in line or "alignment/max_abs_logprob_diff" in line
    ]
    assert len(lines) >= 2
    assert all(line["alignment/max_abs_logprob_diff"] <= 1e-4 for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
