"""Engine hf samples from the real model with the logprobs of plain transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Sampling
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine

QUESTIONS = ("Tom has 12 apples and buys 30 more. How many has he?", "Name a colour.")
# bfloat16 has 8 bits, so a logit near 20 is rounded by up to 0.06. Batch and cache add the terms of a product in another order than a
# forward pass of the whole sequence, which changes such a rounding by a few steps.
BOUND = {"float32": 1e-4, "bfloat16": 0.35}


@pytest.mark.parametrize("dtype", BOUND)
async def test_logprobs_are_those_of_plain_transformers(model: Path, tmp_path: Path, dtype: str) -> None:
    tokenizer = ChatTokenizer(model)
    prompts = [tokenizer.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    engine = HFEngine(HFOptions(dtype=dtype), RunContext(directory=tmp_path, model=model, devices=("cpu",), threads=1))
    try:
        await engine.open()
        found = await asyncio.gather(
            *(engine.sample(prompt, 2, Sampling(8), [i, i + 9], 200) for i, prompt in enumerate(prompts))
        )
    finally:
        await engine.close()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    worst = 0.0
    for prompt, completions in zip(prompts, found, strict=True):
        for completion in completions:
            whole = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
            with torch.no_grad():
                table = plain(input_ids=whole, use_cache=False).logits[0].float().log_softmax(-1)
            at = torch.arange(len(prompt) - 1, whole.shape[1] - 1)
            worst = max(worst, float(np.abs(completion.logprobs - table[at, whole[0, at + 1]].numpy()).max()))
    print(f"{dtype}: {worst:.2g} nats at most")
    assert worst <= BOUND[dtype]
