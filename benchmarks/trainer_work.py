"""What benchmarks/trainer.py trains: a random model of 30 M parameters, and batches with the lengths of GSM8K.

Of GSM8K nothing is kept here but how long its questions and answers are: every 2.5 % of the sorted lengths of the 7,473
training problems, cut as Qwen's tokenizer cuts (words, single digits, runs of punctuation), calculator notes left out.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Batch, offsets_of

Lengths = NDArray[np.int64]

QUESTIONS = (
    11, 27, 29, 31, 33, 34, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 48, 49, 50, 51, 52, 53, 55, 56, 57, 59, 60, 62, 63,
    65, 68, 70, 72, 75, 78, 83, 87, 94, 105, 206,
)  # fmt: skip
ANSWERS = (
    22, 31, 35, 38, 40, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63, 65, 67, 69, 71, 74, 76, 79, 81, 84, 86, 89, 92, 95, 98,
    102, 105, 109, 114, 120, 126, 134, 144, 157, 176, 331,
)  # fmt: skip
PIECES = re.compile(r"[^\W\d_]+|\d|[^\w\s]+|\n")
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip


def lengths(prompts: int, group: int, seed: int, data: Path | None = None) -> tuple[Lengths, Lengths]:
    """[P] and [P * group]: evenly from the whole distribution, so that a small batch has its spread as well, in an order
    drawn from the seed. `data` is GSM8K's train.jsonl, to be counted anew."""
    questions, answers = (QUESTIONS, ANSWERS) if data is None else _counted(data)
    random = np.random.default_rng(seed)

    def drawn(sorted_lengths: tuple[int, ...], count: int) -> Lengths:
        at = (random.permutation(count) + 0.5) / count * (len(sorted_lengths) - 1)
        return np.interp(at, np.arange(len(sorted_lengths)), sorted_lengths).round().astype(np.int64)

    return drawn(questions, prompts), drawn(answers, prompts * group)


def batch(prompt_lengths: Lengths, reply_lengths: Lengths, vocabulary: int, seed: int = 0) -> Batch:
    """Random tokens, group after group. Every sequence has an advantage, so that none is left out of the backward pass."""
    random = np.random.default_rng(seed)
    group = len(reply_lengths) // len(prompt_lengths)
    prompts = [random.integers(2, vocabulary, length) for length in prompt_lengths]
    rows = [
        np.concatenate([prompts[i // group], random.integers(2, vocabulary, n)]) for i, n in enumerate(reply_lengths)
    ]
    offsets = offsets_of([len(row) for row in rows])
    begins = np.repeat(offsets[:-1] + np.repeat(prompt_lengths, group), np.diff(offsets))
    sampled = np.arange(offsets[-1]) >= begins
    advantages = np.repeat(np.where(np.arange(len(rows)) % 2, 1.0, -1.0), np.diff(offsets))
    return Batch(
        tokens=np.concatenate(rows).astype(np.int32), offsets=offsets, sampled=sampled, trained=sampled.copy(),
        logprobs=np.zeros(len(sampled), np.float32), has_logprobs=np.ones(len(rows), np.bool_),
        policy_version=np.zeros(len(sampled), np.int32), advantages=(advantages * sampled).astype(np.float32),
        temperature=np.ones(len(rows), np.float32), truncated=np.zeros(len(rows), np.bool_),
        group=np.repeat(np.arange(len(prompts), dtype=np.int32), group), version=1,
    )  # fmt: skip


def branches(prompts: int, group: int, vocabulary: int, *, length: int, shared: float) -> Batch:
    """As `batch`: of each prompt, `group` sequences of `length` tokens that have this part of them in common and go apart then. The
    prompt is the first tenth; all that follows is sampled and trained, also where it is shared."""
    random = np.random.default_rng(0)
    made = batch(np.full(prompts, length // 10), np.full(prompts * group, length - length // 10), vocabulary)
    rows = made.tokens.reshape(prompts, group, length)
    trunk = int(shared * length)
    rows[:, :, :trunk] = random.integers(2, vocabulary, (prompts, 1, trunk))
    return made


def padded(whole: Batch) -> Batch:
    """The same work as a padded trainer sees it: every prompt and every reply as long as the longest."""
    prompt = (~whole.sampled).astype(np.int64)
    before = np.add.reduceat(prompt, whole.offsets[:-1])
    after = whole.lengths - before
    width, reply = int(before.max()), int(after.max())
    rows = np.full((whole.sequences, width + reply), 2, np.int32)
    sampled, advantages = np.zeros(rows.shape, np.bool_), np.zeros(rows.shape, np.float32)
    for row, (begin, end) in enumerate(zip(whole.offsets[:-1], whole.offsets[1:], strict=True)):
        place = slice(width - before[row], width + after[row])
        rows[row, place] = whole.tokens[begin:end]
        sampled[row, place] = whole.sampled[begin:end]
        advantages[row, place] = whole.advantages[begin:end]
    return replace(
        whole, tokens=rows.ravel(), offsets=np.arange(whole.sequences + 1) * (width + reply), sampled=sampled.ravel(),
        trained=sampled.ravel(), advantages=advantages.ravel(), logprobs=np.zeros(rows.size, np.float32),
        policy_version=np.zeros(rows.size, np.int32),
    )  # fmt: skip


def make_model(directory: Path, tokenizer: Path) -> Path:
    """A random Qwen3 of SHAPE, float32, with the tokenizer of another model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, pad_token_id=0, bos_token_id=None, eos_token_id=1)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return directory


def _counted(data: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    questions = sorted(len(PIECES.findall(row["question"])) for row in rows)
    answers = sorted(len(PIECES.findall(re.sub("<<.*?>>", "", row["answer"]))) for row in rows)
    return tuple(questions), tuple(answers)
