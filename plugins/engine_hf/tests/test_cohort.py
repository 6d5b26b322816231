"""Rows in the model's own cache, for models with windows, sinks, convolutions, states and experts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from atropos_core.types import Sampling, tokens
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.decode_path import before_start
from atropos_torch_models.small_model import small_model

EOS = 2
HYBRID = {"num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "lfm2": {**HYBRID, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {},
    "mamba2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "mistral": {},
    "minimax": {},
    "llama4_text": {},
}
RANDOM = np.random.default_rng(0)
PROMPTS = [tokens(RANDOM.integers(3, 640, length)) for length in (5, 40, 1, 70, 17)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Any) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            model = small_model(AutoConfig.for_model(kind, **FAMILIES[kind]))
            model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
            model.save_pretrained(directory)
            write_tokenizer(directory)
            made[kind] = directory
        return made[kind]

    return make


def plain_logprobs(model: Any, prompt: Any, sampled: Any) -> Any:
    whole = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64))[None]
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=whole, use_cache=False).logits[0].double(), -1)
    at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
    return table[at, whole[0, at + 1]].numpy()


def in_waves(engine: Any, new: int) -> Any:
    """Start calls, and more of them once the first have sampled some tokens."""

    async def wait(steps: int) -> None:
        for _ in range(5 * steps):
            await asyncio.sleep(0)

    async def sample() -> list[Any]:
        first = [
            asyncio.ensure_future(engine.sample(p, 3, Sampling(new + 7 * i), range(3), 60))
            for i, p in enumerate(PROMPTS[:2])
        ]
        await wait(6)
        second = [asyncio.ensure_future(engine.sample(p, 2, Sampling(new), range(2), 60)) for p in PROMPTS[2:4]]
        await wait(9)
        third = [asyncio.ensure_future(engine.sample(PROMPTS[4], 1, Sampling(new), [5], 60))]
        return list(await asyncio.gather(*first, *second, *third))

    return sample()


@pytest.mark.parametrize("kind", FAMILIES)
async def test_logprobs_are_those_of_plain_passes_whenever_rows_enter_and_end(
    open_engine: Any, small: Callable[[str], Path], kind: str
) -> None:
    engine = await open_engine(small(kind))
    assert before_start(HFOptions(), small(kind)).name.startswith("cohort")
    once, again = [await in_waves(engine, 30) for _ in range(2)]
    for prompt, calls in zip(PROMPTS, once, strict=True):
        assert len({completion.tokens.tobytes() for completion in calls}) == len(calls)
        for completion in calls:
            np.testing.assert_allclose(
                completion.logprobs, plain_logprobs(engine.model, prompt, completion.tokens), atol=1e-3
            )
    for one, other in zip(sum(once, []), sum(again, []), strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes() and one.logprobs.tobytes() == other.logprobs.tobytes()
    scored = await engine.logprobs([np.concatenate([PROMPTS[0], once[0][0].tokens])])
    np.testing.assert_allclose(scored[0][len(PROMPTS[0]) :], once[0][0].logprobs, atol=1e-3)
