"""Bridge "ipc" over CUDA IPC, between two real processes on one GPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atropos_core.codec import PREFIX_BYTES, decode, encode_bytes, frame_size

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT RUN: this needs a CUDA device, and torch finds none"
)

TRAINER = """
import asyncio, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from atropos_bridge_ipc.agents import TrainerAgent
from atropos_core.codec import PREFIX_BYTES, decode, encode_bytes, frame_size

class Holder:
    def __init__(self):
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
    def weights_moved(self): pass

def receive():
    head = sys.stdin.buffer.read(PREFIX_BYTES)
    return decode(head + sys.stdin.buffer.read(frame_size(head))) if head else None

async def main():
    agent = TrainerAgent(Holder())
    while (message := receive()) is not None:
        method, *arguments = message
        if method == "scale":
            with torch.no_grad():
                for parameter in agent.holder.model.parameters():
                    parameter.mul_(arguments[0])
            value = await agent.finish_writes()
        else:
            value = await getattr(agent, method)(*arguments)
        sys.stdout.buffer.write(encode_bytes([value])); sys.stdout.buffer.flush()

asyncio.run(main())
"""


def ask(process: subprocess.Popen[bytes], *message: Any) -> Any:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(encode_bytes(list(message)))
    process.stdin.flush()
    head = process.stdout.read(PREFIX_BYTES)
    assert head, "the trainer's process ended: its error is above"
    return decode(head + process.stdout.read(frame_size(head)))[0]


class Holder:
    def __init__(self, model: Any) -> None:
        self.model = model

    def weights_moved(self) -> None: ...


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=640, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainers_write_on_the_gpu_is_in_the_engine_and_no_second_copy_is_made(directory: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    from atropos_bridge_ipc.agents import EngineAgent

    if dtype == "bfloat16":
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(directory)
    named = set(os.listdir("/dev/shm"))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to("cuda:0").eval()
    ids = torch.arange(3, 60, device="cuda:0")[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits.clone()
    agent = EngineAgent(Holder(model))
    reply = asyncio.run(agent.export("cuda_ipc"))
    assert not reply.descriptors
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, before)

    free = torch.cuda.mem_get_info()[0]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        receipt = ask(trainer, "adopt", reply.value)
        assert receipt["segment"] == reply.value["segment"]
        asyncio.run(agent.write_sentinel(0, 1234567))
        assert ask(trainer, "read_sentinel", 0) == 1234567
        ask(trainer, "write_sentinel", 1, 7654321)
        assert asyncio.run(agent.read_sentinel(1)) == 7654321

        ask(trainer, "scale", 1.5)
        with torch.no_grad():
            after = model(input_ids=ids).logits
        assert (after - before).abs().max() > 1e-2
        context = 1 << 30  # what a CUDA context of its own costs the other process, at most
        assert free - torch.cuda.mem_get_info()[0] < context
        assert set(os.listdir("/dev/shm")) <= named, "CUDA IPC left a file of reference counts"
    finally:
        trainer.kill()
        trainer.wait()
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()  # the owner's memory outlives the other's kill
    assert set(os.listdir("/dev/shm")) <= named


def test_the_engine_decodes_on_the_gpu_what_it_reads_there(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Engine "hf" on CUDA: its check at open passes, and sampled logprobs are those of a forward pass."""
    import numpy as np

    from atropos_core.registry import RunContext
    from atropos_core.types import Sampling, tokens
    from atropos_engine_hf.config import HFOptions
    from atropos_engine_hf.engine import HFEngine

    (directory / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )

    async def sample() -> None:
        engine = HFEngine(HFOptions(dtype="float32"), RunContext(directory, directory, devices=("cuda:0",)))
        info = await engine.open()
        assert info.device == "cuda:0"
        prompts = [tokens(range(5, 5 + n)) for n in (3, 17, 40)]
        made = await asyncio.gather(*(engine.sample(p, 16, Sampling(32), range(16), 60) for p in prompts))
        for prompt, completions in zip(prompts, made, strict=True):
            scored = await engine.logprobs([np.concatenate([prompt, c.tokens]) for c in completions])
            for row, completion in zip(scored, completions, strict=True):
                np.testing.assert_allclose(row[len(prompt) :], completion.logprobs, atol=1e-3)
        await engine.close()

    asyncio.run(sample())
