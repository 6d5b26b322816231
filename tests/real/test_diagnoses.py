"""A run of the real model that cannot learn says why, with the figure and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Ended
from tests.e2e.test_diagnoses import named
from tests.real.runs import SMALL

MARKED = f"{Path(__file__).parent / 'marked.py'}:Marked"
WORDS = MARKED.replace("Marked", "Words")
UNSAVED = ("--set", "checkpoint.every=0")


@pytest.mark.timeout(500)
def test_replies_that_are_cut_off_are_reported_with_a_larger_limit(
    model: Path, tmp_path: Path, atropos: Callable[..., Ended]
) -> None:
    ended = atropos(
        "run", "--model", str(model), "--env", MARKED, "--dir", "run", *SMALL, *UNSAVED, "--steps", "1",
        "--set", "evaluation.problems=16", timeout=450,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        tmp_path / "run", ended, "cut_off", 0, "100% of the rollouts are cut off at sampling.max_tokens = 6",
        "raise sampling.max_tokens to",
    )  # fmt: skip


@pytest.mark.timeout(500)
def test_a_learning_rate_that_breaks_the_policy_is_reported_with_a_smaller_one(
    model: Path, tmp_path: Path, atropos: Callable[..., Ended]
) -> None:
    ended = atropos(
        "run", "--model", str(model), "--env", WORDS, "--dir", "run", *SMALL, *UNSAVED,
        "--set", "trainer.learning_rate=1e-2", "--set", "sampling.max_tokens=12", "--set", "trainer.warmup_steps=0", timeout=450,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    named(
        tmp_path / "run", ended, "broken_policy", 2, "the learning rate is 0.01", "trainer.learning_rate to 0.0001 or less"
    )  # fmt: skip
