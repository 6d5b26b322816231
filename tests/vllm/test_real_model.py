"""vLLM samples from a pretrained model, SmolLM2-135M, with the logprobs of plain transformers. Needs its GGUF file: `make test-vllm`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Sampling
from tests.real.conftest import gguf_file, model  # noqa: F401 - fixtures
from tests.vllm.hosted import difference, hosted

QUESTIONS = ("Tom has 12 apples and buys 30 more. How many has he?", "Name a colour.")


@pytest.mark.timeout(500)
@pytest.mark.skipif("REAL_PYTHON" not in os.environ, reason="needs a pretrained model: `make test-vllm`")
async def test_logprobs_are_those_of_plain_transformers(model: Path, tmp_path: Path) -> None:  # noqa: F811
    tokenizer = ChatTokenizer(model)
    prompts = [tokenizer.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    async with hosted(
        model, tmp_path, max_model_len=256, max_num_seqs=8, dtype="float32", enforce_eager=True
    ) as served:
        found = await asyncio.gather(
            *(served.engine.sample(prompt, 2, Sampling(16), [i, i + 9], 200) for i, prompt in enumerate(prompts))
        )
    worst = max(difference(model, prompt, made) for prompt, made in zip(prompts, found, strict=True))
    print(f"{worst:.2g} nats at most")
    assert worst <= 1e-4


TEXT = (
    "The grey heron stood by the river for an hour, and then it caught a small silver fish near the old wooden bridge."
)


@pytest.mark.timeout(500)
@pytest.mark.skipif("REAL_PYTHON" not in os.environ, reason="needs a pretrained model: `make test-vllm`")
async def test_copied_text_is_accepted_and_is_what_the_model_writes_without_speculation(
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    tokenizer = ChatTokenizer(model)
    prompt = tokenizer.render([{"role": "user", "content": f"Repeat this text word for word: {TEXT}"}])
    options = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "enforce_eager": True}
    async with hosted(model, tmp_path / "plain", **options) as served:
        [plain] = await served.engine.sample(prompt, 1, Sampling(40, 0.0), [1], 200)
    async with hosted(model, tmp_path / "speculating", **options, speculation="ngram") as served:
        [greedy] = await served.engine.sample(prompt, 1, Sampling(40, 0.0), [1], 200)
        sampled = await served.engine.sample(prompt, 3, Sampling(40, 0.7), range(3), 200)
        metrics = await served.engine.step_metrics()
    print(metrics)
    np.testing.assert_array_equal(greedy.tokens, plain.tokens)
    worst = max(difference(model, prompt, made) for made in ([greedy], sampled))
    print(f"{worst:.2g} nats at most")
    assert worst <= 1e-4
    assert metrics["draft_acceptance"] > 0.3 and metrics["acceptance_length"] > 2
