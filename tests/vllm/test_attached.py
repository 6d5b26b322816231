"""Whole runs on a server that somebody else started, one after another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.types import Completion, Sampling, tokens
from atropos_env_gsm8k.plugin import HERE
from tests.conftest import metrics_of
from tests.vllm.hosted import Hosted, difference, start
from tests.vllm.models import make_adapter, make_model

pytestmark = pytest.mark.timeout(400)

PROMPT = tokens([5, 9, 33, 7])

RUN = (
    "--engine", "vllm", "--env", "gsm8k", "--bridge", "checkpoint", "--steps", "6", "--set", "evaluation.problems=64",
    "--set", "training.groups_per_step=8",
)  # fmt: skip


async def test_each_run_begins_with_its_own_model_and_an_evaluation_is_of_the_requested_one(
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
        assert f"{first[-1]['eval/accuracy']:.4g}" in ended.out, "though the server had the second run's weights"
        prompt = tokens([5, 9, 33])
        assert len(await owner.engine.sample(prompt, 1, Sampling(4), [1], 60.0)) == 1, "it was left running"
    finally:
        await owner.engine.close()


async def sampled(by: Hosted) -> list[Completion]:
    return await by.engine.sample(PROMPT, 2, Sampling(16), [1, 2], 60.0)


async def test_an_adapter_is_sampled_over_its_own_base_and_a_model_that_is_refused_leaves_the_server_as_it_was(
    tmp_path: Path,
) -> None:
    model, other = [make_model(tmp_path / f"model-{seed}", "qwen3", seed=seed) for seed in (0, 1)]
    adapter = make_adapter(tmp_path / "adapter", model)
    owner = await start(
        model, tmp_path / "owner", kv_cache_gb=0.25, transport="adapter", announced={"lora": {"rank": 4}}, max_loras=2
    )
    attach: dict[str, Any] = {"url": owner.url, "environment": {"VLLM_API_KEY": owner.key}}
    try:
        guest = await start(other, tmp_path / "earlier", **attach)
        assert difference(other, PROMPT, await sampled(guest)) <= 1e-4
        await guest.engine.close()
        assert difference(model, PROMPT, await sampled(owner)) > 0.5, "the earlier one left its weights"

        guest = await start(adapter, tmp_path / "guest", **attach)
        assert difference(model, PROMPT, await sampled(guest), adapter) <= 1e-4
        await guest.engine.close()

        wide = make_model(tmp_path / "wide", "qwen3", intermediate_size=256)
        with pytest.raises(FitError, match="serves .* with intermediate_size = 192, but this run's model has 256"):
            await start(wide, tmp_path / "not-wide", **attach)
        (other / "model.safetensors").unlink()
        with pytest.raises(WeightsMismatch, match="vLLM cannot load the weights in .*Cannot find any model weights"):
            await start(other, tmp_path / "refused", **attach)
        assert difference(model, PROMPT, await sampled(owner)) <= 1e-4
    finally:
        await owner.engine.close()
