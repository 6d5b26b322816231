"""Make the tiny policy that `atropos run --env gsm8k` trains by default: tokenizer, weights, chat template and card, from nothing.

    python tools/make_tiny_policy.py [--out FOLDER] [--seed 0]

The warm start stops on purpose before the model is good: reinforcement learning is to have something left to do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "env_gsm8k"))
from atropos_env_gsm8k.generate import problem  # noqa: E402

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}<|user|>{{ message.content }}"
    "{%- elif message.role == 'assistant' -%}<|assistant|>{{ message.content }}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
# A word takes the space before it, and the one after it too when a digit follows: digits stay single and never carry a space.
WORDS = r" ?\p{L}+(?: (?=\p{N}))?|\p{N}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+| (?=\p{N}))?|\s+(?!\S)|\s+"
VOCABULARY = 640
LONGEST_ANSWER = 64

HASTY_SHARE = 0.6
GREEDY_ENOUGH = 0.42
BATCH = 96
LEARNING_RATE = 2e-3
EVALUATE_EVERY = 40
HELD_OUT = 1024


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    records = (problem("train", index) for index in range(8000))
    tokenizer.train_from_iterator((text for r in records for text in (r["question"], careful(r), r["answer"])), trainer)
    return tokenizer


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


def careful(record: dict[str, str]) -> str:
    """Every step, without GSM8K's calculator annotations, as is usual where no calculator listens."""
    lines = record["answer"].split("\n")
    return "\n".join(line if line.startswith("####") else _without_annotation(line) for line in lines)


def _without_annotation(line: str) -> str:
    return line[: line.index("<<")] + line[line.index(">>") + 2 :]


def hasty(record: dict[str, str]) -> str:
    """The final number alone: right, but more than the model can work out in its head."""
    return record["answer"].split("\n")[-1]


def prompt_text(record: dict[str, str]) -> str:
    return f"{USER}{record['question']}{ASSISTANT}"


def demonstrations(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    choose = random.Random(seed)
    index = 0
    while True:
        record = problem("train", index)
        answer = hasty(record) if choose.random() < HASTY_SHARE else careful(record)
        yield tokenizer.encode(prompt_text(record)).ids, tokenizer.encode(answer + END).ids
        index += 1


def warm_start_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: list[tuple[list[int], list[int]]]
) -> float:
    longest = max(len(prompt) + len(answer) for prompt, answer in batch)
    tokens = torch.full((len(batch), longest), model.config.pad_token_id)
    labels = torch.full((len(batch), longest), -100)
    for row, (prompt, answer) in enumerate(batch):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss)


@dataclass(frozen=True)
class Measured:
    greedy: float
    sampled: float
    answer_tokens: float
    prompt_tokens: float


@torch.no_grad()
def answers(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str], greedy: bool) -> list[list[int]]:
    """One answer to each prompt, `<|end|>` left off."""
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    encoded = [tokenizer.encode(text).ids for text in prompts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    found: list[list[int]] = [[] for _ in encoded]
    for start in range(0, len(order), 256):
        rows = order[start : start + 256]
        longest = max(len(encoded[i]) for i in rows)
        tokens = torch.tensor([[pad] * (longest - len(encoded[i])) + encoded[i] for i in rows])
        out = model.generate(
            input_ids=tokens,
            attention_mask=(tokens != pad).long(),
            do_sample=not greedy,
            max_new_tokens=LONGEST_ANSWER,
            top_k=0,
        )
        for i, answer in zip(rows, out[:, longest:].tolist(), strict=True):
            found[i] = answer[: answer.index(end)] if end in answer else answer
    return found


def is_right(record: dict[str, str], answer: str) -> bool:
    return answer.rpartition("####")[2].strip() == record["answer"].rpartition("####")[2].strip() and "####" in answer


def measure(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Measured:
    records = [problem("test", index) for index in range(HELD_OUT)]
    prompts = [prompt_text(record) for record in records]
    model.eval()
    shares = {}
    for greedy in (True, False):
        found = answers(model, tokenizer, prompts, greedy)
        texts = [tokenizer.decode(answer) for answer in found]
        shares[greedy] = sum(map(is_right, records, texts)) / HELD_OUT
    model.train()
    return Measured(
        shares[True],
        shares[False],
        sum(len(answer) + 1 for answer in found) / HELD_OUT,
        sum(len(tokenizer.encode(text).ids) for text in prompts) / HELD_OUT,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "plugins/env_gsm8k/atropos_env_gsm8k/tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hasty", type=float, default=HASTY_SHARE)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    globals()["HASTY_SHARE"] = options.hasty
    torch.manual_seed(options.seed)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    print(sum(p.numel() for p in model.parameters()), "parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    stream = demonstrations(tokenizer, options.seed)
    began = time.monotonic()
    for step in range(1, 10**6):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 50)
        loss = warm_start_step(model, optimizer, [next(stream) for _ in range(BATCH)])
        if step % EVALUATE_EVERY == 0:
            measured = measure(model, tokenizer)
            print(f"step {step} loss {loss:.3f} {time.monotonic() - began:.0f} s {measured}", flush=True)
            if (measured.greedy >= GREEDY_ENOUGH and not options.steps) or step == options.steps:
                break
    save(options.out, model, tokenizer)


def save(out: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": PAD,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 1024,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
