"""Copies of matrices in oneDNN's order compute what the model computes, and follow its weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Sampling
from atropos_engine_hf import limits
from atropos_engine_hf.blocked_weights import blockable
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine
from atropos_engine_hf.plugin import holds, keeps

SHAPE = {
    "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip # 12.4 M elements in matrices


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("larger")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=None)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    return folder


async def sampled(engine):
    prompt = np.arange(3, 20, dtype=np.int32)
    made = await engine.sample(prompt, 3, Sampling(max_tokens=4), range(3), 60)
    return [(np.concatenate([prompt, one.tokens]), one.logprobs) for one in made]


def expected(model, tokens, count):
    """Logprobs of the last `count` tokens, by the model's layers as torch has them."""
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    kept = [layer.__dict__.pop("forward", None) for layer in layers]
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double()
    finally:
        for layer, forward in zip(layers, kept, strict=True):
            if forward is not None:
                layer.forward = forward
    logs = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    return logs[-count:].numpy()


async def test_logprobs_are_those_of_the_plain_model_and_follow_its_weights(directory):
    engine = HFEngine(HFOptions(), RunContext(directory, directory, threads=1))
    await engine.open()
    try:
        assert all("forward" in layer.__dict__ for layer in blockable(engine.model))
        for version in range(2):
            for tokens, logprobs in await sampled(engine):
                np.testing.assert_allclose(logprobs, expected(engine.model, tokens, len(logprobs)), atol=1e-5)
            scored = await engine.logprobs([tokens])
            np.testing.assert_allclose(scored[0][1:], expected(engine.model, tokens, len(tokens) - 1), atol=1e-5)
            async with engine.paused(version + 1):
                with torch.no_grad():
                    for parameter in engine.model.parameters():
                        parameter.mul_(1.5)
    finally:
        await engine.close()


def test_the_memory_plan_counts_the_copies(directory, tiny):
    def workload(at):
        return Workload(RunContext(at, at), 1, 1, 8, 4, prompt_tokens=8)

    def planned(at):
        return {one.what: one.size_bytes for one in holds(HFOptions(), workload(at))}.get("matrices in blocks")

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert planned(directory) == sum(4 * layer.weight.numel() for layer in blockable(model))
    assert planned(tiny) is None
    said = f"a second copy of the matrices for faster decoding, {planned(directory) / 1e6:.0f} MB"
    assert (keeps(HFOptions(), workload(directory)), keeps(HFOptions(), workload(tiny))) == (said, "")


def test_a_model_with_large_matrices_has_no_copies(directory, monkeypatch):
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    monkeypatch.setattr("atropos_engine_hf.blocked_weights.BLOCKED_BYTES", limits.BLOCKED_FROM)
    assert blockable(model) == []
