"""A checkpoint of trainer "grpo" as an earlier Atropos saved it: a policy of a thousand parameters, with its optimiser's moments.

`python -m tests.pins.policy` writes data/policy.tar.gz anew, with the code of that day: `model/`, what the trainer began with;
`checkpoint/`, what it saved after two steps; `batches`, of four steps; `logprobs.npy`, of the first batch's tokens before the
third step and after the fourth, [2, N]. And `lora/checkpoint`, `lora/logprobs.npy`: the same of an adapter.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from atropos_core.codec import decode, encode_bytes
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Batch
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer

RECORDED = Path(__file__).parent / "data/policy.tar.gz"
WORDS = 19
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "lora": {"lora": {"rank": 2}},
}


@asynccontextmanager
async def opened(folder: Path, kind: str) -> AsyncIterator[GrpoTrainer]:
    """The trainer on `folder / "model"`."""
    transport = "adapter" if kind == "lora" else "checkpoint"
    context = RunContext(folder, folder / "model", steps=4, seed=3, deterministic=True, transport=transport, threads=1)
    trainer = GrpoTrainer(GrpoOptions(learning_rate=1e-2, warmup_steps=3, weight_decay=0.01, **KINDS[kind]), context)
    await trainer.open()
    try:
        yield trainer
    finally:
        await trainer.close()


async def step(trainer: GrpoTrainer, batches: Sequence[Batch]) -> None:
    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        yield

    for batch in batches:
        await trainer.step(batch, writing)


async def logprobs(trainer: GrpoTrainer, batch: Batch) -> np.ndarray[Any, Any]:
    rows = [batch.tokens[start:end] for start, end in pairwise(batch.offsets)]
    return np.concatenate(await trainer.logprobs(rows))


def batches(folder: Path) -> list[Batch]:
    read: list[Batch] = decode((folder / "batches").read_bytes())
    return read


def _model(folder: Path) -> None:
    torch.manual_seed(5)
    shape = Qwen3Config(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        initializer_range=0.3,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def _batch(number: int) -> Batch:
    random = np.random.default_rng(number)
    lengths = random.integers(4, 12, 4)
    tokens = random.integers(2, WORDS, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sampled = np.concatenate([np.arange(length) >= 2 for length in lengths])
    return Batch(
        tokens=tokens, offsets=offsets, sampled=sampled, trained=sampled.copy(),
        logprobs=np.where(sampled, random.normal(-3.0, 0.5, len(tokens)), 0).astype(np.float32),
        has_logprobs=np.ones(4, np.bool_), policy_version=np.full(len(tokens), number, np.int32),
        advantages=np.where(sampled, np.repeat([1.0, -1.0, 0.5, -0.5], lengths), 0).astype(np.float32),
        temperature=np.ones(4, np.float32), truncated=np.zeros(4, np.bool_), group=np.array([0, 0, 1, 1], np.int32),
        version=number + 1,
    )  # fmt: skip


async def _record(folder: Path) -> None:
    _model(folder / "model")
    made = [_batch(number) for number in range(4)]
    (folder / "batches").write_bytes(encode_bytes(made))
    for kind in KINDS:
        (saved := folder / kind / "checkpoint").mkdir(parents=True)
        async with opened(folder, kind) as trainer:
            await step(trainer, made[:2])
            await trainer.save(saved)
            before = await logprobs(trainer, made[0])
            await step(trainer, made[2:])
            np.save(folder / kind / "logprobs.npy", np.stack([before, await logprobs(trainer, made[0])]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(_record(Path(made)))
        with tarfile.open(RECORDED, "w:gz") as packed:
            for name in ("model", "checkpoint", "batches", "logprobs.npy", "lora"):
                packed.add(Path(made) / name, name)
