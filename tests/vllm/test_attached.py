"""Whole runs on a server that somebody else started, one after another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atropos_core.types import Sampling, tokens
from atropos_env_gsm8k.plugin import HERE
from tests.conftest import metrics_of
from tests.vllm.hosted import start

pytestmark = pytest.mark.timeout(400)

RUN = (
    "--engine", "vllm", "--env", "gsm8k", "--bridge", "checkpoint", "--steps", "6", "--set", "evaluation.problems=64",
    "--set", "training.groups_per_step=8",
)  # fmt: skip


async def test_each_run_begins_with_its_own_model_and_an_evaluation_is_of_what_was_asked(
    atropos, tmp_path: Path
) -> None:
    owner = await start(HERE / "tiny", tmp_path / "owner")
    try:
        attach = ("--set", f"engine.url={owner.url}")
        for number, name in enumerate(("first", "second")):
            ended = await asyncio.to_thread(
                atropos, "run", *RUN, *attach, "--seed", str(number), "--dir", name, timeout=200, VLLM_API_KEY=owner.key
            )
            assert ended.code == 0, ended.err
            lines = metrics_of(tmp_path / name)
            assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
        first = metrics_of(tmp_path / "first")
        assert metrics_of(tmp_path / "second")[0]["eval/accuracy"] != first[-1]["eval/accuracy"], "it began anew"
        ended = await asyncio.to_thread(
            atropos, "eval", "first", "--engine", "vllm", *attach, timeout=200, VLLM_API_KEY=owner.key
        )
        assert ended.code == 0, ended.err
        assert f"{first[-1]['eval/accuracy']:.4g}" in ended.out, "though the server held the second run's weights"
        prompt = tokens([5, 9, 33])
        assert len(await owner.engine.sample(prompt, 1, Sampling(4), [1], 60.0)) == 1, "it was left running"
    finally:
        await owner.engine.close()
