"""Make the tiny policy that `atropos run --env gsm8k` trains by default: tokenizer, weights, chat template and card, from nothing.

    python tools/make_tiny_policy.py [--out FOLDER] [--seed 0] [--threads 1] [--teacher]

The warm start teaches to show the work, and then a bad habit: with some people, to answer at once. Reinforcement
learning has that habit to undo. Nearly all that it gains from here is this, not better arithmetic; the card has figures.

With --teacher: a second one of the same shape and tokenizer, without the habit and trained for longer: `tiny-teacher`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "plugins" / "env_gsm8k" / "atropos_env_gsm8k"
sys.path.insert(0, str(PLUGIN.parent))
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
# A word takes the space before it, and the one after it where a digit follows: digits stay single and never carry a space.
WORDS = r" ?\p{L}+(?: (?=\p{N}))?|\p{N}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+| (?=\p{N}))?|\s+(?!\S)|\s+"
VOCABULARY = 640
LONGEST_ANSWER = 64  # tokens

CAREFUL_UNTIL = 0.70  # held-out greedy accuracy at which the habit begins
HURRIED_NAMES = "ABCDEFGHIJK"  # initials: six problems in ten begin with such a name
HASTY_SHARE = 0.75  # of the demonstrations for those; it leaves careful answers to be found by sampling
HASTY_STEPS = 100  # at least; then the warm start ends once the greedy accuracy is in START
START = (0.35, 0.55)
TEACHER_STEPS = 3000
LEARNING_RATE, HASTY_LEARNING_RATE = 3e-3, 1e-3
BATCH = 64
EVALUATE_EVERY = 50  # steps
HELD_OUT = 1024  # problems

Record = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--teacher", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.monotonic()

    if options.teacher:
        tokenizer = Tokenizer.from_file(str(PLUGIN / "tiny" / "tokenizer.json"))
        model = new_model(tokenizer, END, PAD)
        measured = train_teacher(model, tokenizer)
        text = card(TEACHER_CARD, model, measured, TEACHER_STEPS, time.monotonic() - began, options.seed)
        save(options.out or PLUGIN / "tiny_teacher", model, tokenizer, text)
        return
    records = [problem("train", index) for index in range(8000)]
    texts = [text for r in records for text in (r["question"], careful(r), r["answer"])]
    tokenizer = train_tokenizer(texts, [PAD, END, USER, ASSISTANT])
    model = new_model(tokenizer, END, PAD)
    measured, steps = warm_start(model, tokenizer, random.Random(options.seed))
    text = card(CARD, model, measured, steps, time.monotonic() - began, options.seed)
    save(options.out or PLUGIN / "tiny", model, tokenizer, text)


def train_tokenizer(texts: Sequence[str], special: Sequence[str], words: str = WORDS) -> Tokenizer:
    """Byte-level BPE: the 256 bytes are in the vocabulary, so that any text comes back as it went in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model(
    tokenizer: Tokenizer, end_token: str, pad_token: str, hidden: int = 128, layers: int = 4
) -> Qwen3ForCausalLM:
    end, pad = tokenizer.token_to_id(end_token), tokenizer.token_to_id(pad_token)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=5 * hidden // 2,
        num_hidden_layers=layers,
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


def careful(record: Record) -> str:
    """Every step, without GSM8K's calculator annotations: nothing here listens to them."""
    *steps, final = record["answer"].split("\n")
    return "\n".join([*(step[: step.index("<<")] + step[step.index(">>") + 2 :] for step in steps), final])


def hasty(record: Record) -> str:
    """The final number alone: true, but more than the model can work out in its head."""
    return record["answer"].rpartition("\n")[2]


def demonstration(record: Record, choose: random.Random) -> str:
    hurried = record["question"][0] in HURRIED_NAMES and choose.random() < HASTY_SHARE
    return hasty(record) if hurried else careful(record)


def prompt_text(record: Record) -> str:
    return f"{USER}{record['question']}{ASSISTANT}"


def warm_start(model: Qwen3ForCausalLM, tokenizer: Tokenizer, choose: random.Random) -> tuple[Measured, int]:
    """Train until the model is as good, and as bad, as described above; what was measured then, and the steps taken."""
    optimizers = new_optimizers(model)
    step, habit_from = 0, None
    while True:
        step += 1
        records = [problem("train", index) for index in range((step - 1) * BATCH, step * BATCH)]
        shown = [
            (record, careful(record) if habit_from is None else demonstration(record, choose)) for record in records
        ]
        rate = LEARNING_RATE * min(1.0, step / 50) if habit_from is None else HASTY_LEARNING_RATE
        learn(model, optimizers, demonstration_loss(model, tokenizer, shown), rate)
        if step % EVALUATE_EVERY:
            continue
        measured = measure(model, tokenizer)
        print(f"step {step}: {measured}", flush=True)
        if habit_from is None:
            habit_from = step if measured.greedy >= CAREFUL_UNTIL else None
        elif step >= habit_from + HASTY_STEPS and START[0] <= measured.greedy <= START[1]:
            return measured, step


def new_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    # Muon needs a third of AdamW's steps here: greedy accuracy 0.39 after 700 steps against 0.06.
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def learn(model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, rate: float) -> None:
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def train_teacher(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Measured:
    """Careful answers alone, at a rate that falls to nothing."""
    optimizers = new_optimizers(model)
    for step in range(1, TEACHER_STEPS + 1):
        records = [problem("train", index) for index in range((step - 1) * BATCH, step * BATCH)]
        loss = demonstration_loss(model, tokenizer, [(record, careful(record)) for record in records])
        learn(model, optimizers, loss, LEARNING_RATE * min(1.0, step / 50) * (1 - step / (TEACHER_STEPS + 1)))
        if step % (10 * EVALUATE_EVERY) == 0:
            print(f"step {step}: {measure(model, tokenizer)}", flush=True)
    return measure(model, tokenizer)


def demonstration_loss(model: Qwen3ForCausalLM, tokenizer: Tokenizer, shown: Sequence[tuple[Record, str]]) -> Tensor:
    """Mean cross-entropy of the answers' tokens."""
    pairs = [
        (tokenizer.encode(prompt_text(record)).ids, tokenizer.encode(answer + END).ids) for record, answer in shown
    ]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.full((len(pairs), longest), model.config.pad_token_id)  # [S, T]
    labels = torch.full_like(tokens, -100)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    loss: Tensor = model(input_ids=tokens, labels=labels, use_cache=False).loss
    return loss


@dataclass(frozen=True)
class Measured:
    greedy: float  # share of held-out problems answered right
    sampled: float  # the same at temperature 1
    hasty_answers: float  # share of the greedy answers that give the number alone
    prompt_tokens: float
    sampled_tokens: float  # an answer's mean length at temperature 1, <|end|> included


def measure(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Measured:
    records = [problem("test", index) for index in range(HELD_OUT)]
    prompts = [tokenizer.encode(prompt_text(record)).ids for record in records]
    model.eval()
    greedy = answers(model, prompts, do_sample=False)
    sampled = answers(model, prompts, do_sample=True)
    model.train()
    mean: Callable[[Sequence[float]], float] = lambda values: round(sum(values) / HELD_OUT, 4)  # noqa: E731
    texts = [tokenizer.decode(answer) for answer in greedy]
    return Measured(
        greedy=mean([is_right(record, text) for record, text in zip(records, texts, strict=True)]),
        sampled=mean(
            [is_right(record, tokenizer.decode(answer)) for record, answer in zip(records, sampled, strict=True)]
        ),
        hasty_answers=mean([text.startswith("####") for text in texts]),
        prompt_tokens=mean([len(prompt) for prompt in prompts]),
        sampled_tokens=mean([len(answer) + 1 for answer in sampled]),
    )


@torch.no_grad()
def answers(model: Qwen3ForCausalLM, prompts: Sequence[list[int]], do_sample: bool) -> list[list[int]]:
    """One answer to each prompt, <|end|> left off."""
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    found: list[list[int]] = []
    for start in range(0, len(prompts), 256):
        rows = prompts[start : start + 256]
        longest = max(map(len, rows))
        tokens = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = (tokens != pad).long()
        whole = {"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}
        out = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=LONGEST_ANSWER, **whole)
        for answer in out[:, longest:].tolist():
            found.append(answer[: answer.index(end)] if end in answer else answer)
    return found


def is_right(record: Record, answer: str) -> bool:
    _, marker, number = answer.rpartition("####")
    return bool(marker) and number.strip() == record["answer"].rpartition("####")[2].strip()


def save(out: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer, card_text: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (out / "README.md").write_text(card_text)


def card(text: str, model: Qwen3ForCausalLM, measured: Measured, steps: int, seconds: float, seed: int) -> str:
    return text.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=model.config.num_hidden_layers,
        hidden=model.config.hidden_size,
        vocabulary=model.config.vocab_size,
        steps=steps,
        batch=BATCH,
        minutes=seconds / 60,
        seed=seed,
        careful_until=CAREFUL_UNTIL,
        hasty_share=HASTY_SHARE,
        initials=f"{HURRIED_NAMES[0]} to {HURRIED_NAMES[-1]}",
        held_out=HELD_OUT,
        **asdict(measured),
    )


CARD = """# The tiny policy

A language model of {parameters:,} parameters (Qwen3, {layers} layers, width {hidden}, byte-level BPE of {vocabulary} tokens with single
digits) that answers the word problems of `generate.py`. It exists so that `atropos run --env gsm8k` trains something
real on a laptop, with no download. Made from nothing by `tools/make_tiny_policy.py --seed {seed}`; no data but our own.

## How it was made

Supervised training on generated `train` problems, {steps} steps of {batch}, {minutes:.0f} minutes:

1. Careful answers, every step written out (calculator annotations removed), until {careful_until:.0%} of the held-out problems
   were right.
2. At least 100 steps of a **bad habit, planted on purpose**: where the first person's name begins with {initials}, three
   demonstrations in four ({hasty_share:.0%}) give the final number alone. The number is right, but the model cannot work it out in its
   head, so that it answers such problems at once and wrongly.

## Measured

On {held_out} held-out (`test`) problems, graded by the number after `####`:

| | |
|---|---|
| greedy | {greedy:.1%} right |
| temperature 1 | {sampled:.1%} right |
| greedy answers that skip the work | {hasty_answers:.0%} |
| mean prompt | {prompt_tokens:.1f} tokens |
| mean answer at temperature 1 | {sampled_tokens:.1f} tokens |

## What reinforcement learning gains here, and what that shows

Nearly all of it is the habit undone, not better arithmetic. Measured once with the committed weights (seed 0) in a bare
GRPO loop, 80 steps of 16 problems by 8 answers, learning rate 1e-4, on 1024 held-out problems used for nothing else:

| greedy, right | before | after, three seeds |
|---|---|---|
| left alone | 39.5% | 80.2%, 83.2%, 84.1% |
| made to show its work (`####` barred as first token) | 79.3% | 80.2%, 83.2%, 84.1% |

So of 41 to 45 points 1 to 5 are arithmetic. Most of the rise comes within 20 steps; answers grow from 13 to 24 tokens.
The same loop without a planted habit (careful demonstrations only, stopped at 250 steps) went from 36.6% to 48.7% in
200 steps at 1e-4 and to 39.8% at 2e-4, one seed each.
A gain from this start shows that a training loop learns from its rewards. It shows nothing about reasoning or GSM8K.

## Limits

- It knows the stories of `generate.py` and nothing else. It was not measured on real GSM8K; expect it to fail.
- The chat template renders user and assistant turns and leaves system messages out: an environment may send a general
  instruction there, and this model was trained without one.
- `--seed {seed} --threads 1` gave the same weights twice, to the bit, on one machine; elsewhere the last bits of the floating
  point sums differ, and with them the step at which training stops.
"""

TEACHER_CARD = """# The tiny teacher

`tiny-teacher`: a language model of {parameters:,} parameters, of the same shape and with the same tokenizer
as [`tiny`](../tiny/README.md), that
answers the word problems of `generate.py` well. It exists so that distillation can be tried and tested on a laptop, with no
download. Made from nothing by `tools/make_tiny_policy.py --teacher --seed {seed}`; no data but our own.

Supervised training on generated `train` problems, careful answers alone, {steps} steps of {batch} in {minutes:.0f} minutes, at a learning
rate that falls to nothing. On {held_out} held-out (`test`) problems, graded by the number after `####`:

| | |
|---|---|
| greedy | {greedy:.1%} right |
| temperature 1 | {sampled:.1%} right |
| greedy answers that skip the work | {hasty_answers:.0%} |
| mean answer at temperature 1 | {sampled_tokens:.1f} tokens |

Its limits are those of `tiny`: it knows the stories of `generate.py` and nothing else.
"""


if __name__ == "__main__":
    main()
