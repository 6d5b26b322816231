"""Make `tiny-tools`, a policy that calls a calculator: tokenizer, weights, chat template and card, from nothing.

    python tools/make_tiny_tools.py [--out FOLDER] [--seed 0] [--threads 1]

It is made as `tiny` is (make_tiny_policy.py), of conversations with the environment `calculator`. The warm start teaches to
call the tool and to answer with what it says, and then two bad habits, which reinforcement learning has to undo: to answer at
once with some people, and to put words into the call with others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from make_tiny_policy import PLUGIN, WORDS, learn, new_model, new_optimizers, train_tokenizer  # noqa: E402

sys.path.insert(0, str(PLUGIN.parent))
import atropos_core as atropos  # noqa: E402
from atropos_core.rollouts.tokenizer import ChatTokenizer  # noqa: E402
from atropos_core.types import Message  # noqa: E402
from atropos_env_gsm8k.calculator import ALL_CODES, CALCULATE, CODES, NOT_READ, problem, result_of  # noqa: E402

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# As Qwen's and Hermes' models have it, with fewer words about the tools.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# As `tiny` divides text, but that the keys of a JSON object keep their quotes, braces and commas: a call is some 16 tokens.
WORDS_AND_KEYS = r'["{}\], ]*"\p{L}+": (?:\{|\["|")?|' + WORDS
HIDDEN, LAYERS = 96, 3

HASTY, SLOPPY = ("Ann", "Ben", "Cleo", "Dan", "Eva"), ("Finn", "Gus", "Hana")  # of the eleven people
HABIT_SHARE = 0.75  # of the demonstrations with such people; it leaves the right way to be found by sampling
CAREFUL_STEPS, HABIT_STEPS = 150, 70
LEARNING_RATE, HABIT_LEARNING_RATE = 3e-3, 1e-3
BATCH = 32
HELD_OUT = 500  # problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLUGIN / "tiny_tools")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    began = time.process_time()
    options.out.mkdir(parents=True, exist_ok=True)
    choose = random.Random(options.seed)
    tokenizer = make_tokenizer(options.out, choose)
    model = new_model(tokenizer, END, PAD, HIDDEN, LAYERS)
    train(model, ChatTokenizer(options.out), choose)
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)
    minutes = (time.process_time() - began) / 60
    (options.out / "README.md").write_text(card(model, measured(options.out), minutes, options.seed))


def make_tokenizer(out: Path, choose: random.Random) -> Tokenizer:
    demonstrations = [
        text for step in range(60) for code in codes(step) for text in (problem(code)[0], *replies(code, choose, True))
    ]
    around = f"system\n# Tools\n<tools>\n{json.dumps(CALCULATE)}\n</tools>\nuser\nassistant\nerror: {NOT_READ}"
    tokenizer = train_tokenizer([*demonstrations, *[around] * 200], [PAD, END, START], WORDS_AND_KEYS)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer


def codes(step: int) -> list[int]:
    """Problems of this step: none that the environment poses, in either split."""
    draws, posed = random.Random(step), set(CODES)
    drawn = [draws.randrange(ALL_CODES) for _ in range(2 * BATCH)]
    return [code for code in drawn if code not in posed][:BATCH]


def replies(code: int, choose: random.Random, habits: bool) -> list[str]:
    """What the assistant says in a demonstration, turn after turn."""
    question, operations, answer = problem(code)
    right = [*(call(operation) for operation in operations), f"#### {answer}"]
    who = question.split()[0]
    if not habits or who not in HASTY + SLOPPY or choose.random() >= HABIT_SHARE:
        return right
    if who in HASTY:
        return right[-1:]  # true, but more than the model can work out in its head
    sloppy = call(f"{operations[0]} {question.rstrip('?').split()[-1]}")
    return [sloppy, *(right if choose.random() < 0.5 else ["I do not know."])]


def call(operation: str) -> str:
    return f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{operation}"}}}}\n</tool_call>'


def conversation(code: int, said: list[str], chat: ChatTokenizer) -> tuple[list[int], list[int]]:
    """Ids, as the environment would have them, and labels: the same where the assistant speaks, else -100."""
    messages: list[Message] = [{"role": "user", "content": problem(code)[0]}]
    ids, labels = np.zeros(0, np.int32), np.zeros(0, np.int64)
    for text in said:
        new = chat.extend(messages, ids, [CALCULATE]) if len(ids) else chat.render(messages, [CALCULATE])
        reply = chat.encode(text + END)
        ids = np.concatenate([ids, new, reply])
        labels = np.concatenate([labels, np.full(len(new), -100), reply])
        calls = chat.parse(reply).get("tool_calls", ())
        messages = [{"role": "tool", "content": result_of(one)} for one in calls]
    return ids.tolist(), labels.tolist()


def train(model: Qwen3ForCausalLM, chat: ChatTokenizer, choose: random.Random) -> None:
    optimizers = new_optimizers(model)
    for step in range(1, CAREFUL_STEPS + HABIT_STEPS + 1):
        habits = step > CAREFUL_STEPS
        rows = [conversation(code, replies(code, choose, habits), chat) for code in codes(step)]
        loss = loss_of(model, rows)
        learn(model, optimizers, loss, HABIT_LEARNING_RATE if habits else LEARNING_RATE * min(1.0, step / 50))
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def loss_of(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """Mean cross-entropy of what the assistant says."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), longest), model.config.pad_token_id)  # [S, T]
    labels = torch.full_like(tokens, -100)
    for row, (ids, wanted) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(wanted)
    loss: Tensor = model(input_ids=tokens, labels=labels, use_cache=False).loss
    return loss


def measured(model: Path) -> dict[str, float]:
    """Shares and means over held-out problems, greedy and at temperature 1."""
    found = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        result = atropos.evaluate(
            environment="calculator", model=model, problems=HELD_OUT, temperature=temperature, set={"sampling.max_tokens": 48}
        )  # fmt: skip
        for key in ("accuracy", "tools/calls", "tools/errors"):
            found[f"{name}_{key.rpartition('/')[2]}"] = result.metrics[f"eval/{key}"]
    return found


def card(model: Qwen3ForCausalLM, figures: dict[str, float], minutes: float, seed: int) -> str:
    return CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=LAYERS,
        hidden=HIDDEN,
        vocabulary=model.config.vocab_size,
        careful=CAREFUL_STEPS,
        habits=HABIT_STEPS,
        batch=BATCH,
        share=HABIT_SHARE,
        hasty=", ".join(HASTY),
        sloppy=", ".join(SLOPPY),
        minutes=minutes,
        seed=seed,
        held_out=HELD_OUT,
        **figures,
    )


CARD = """# The tiny policy that calls tools

`tiny-tools`: a language model of {parameters:,} parameters (Qwen3, {layers} layers, width {hidden}, byte-level BPE of
{vocabulary} tokens with single digits) that works out the word problems of the environment `calculator` by calling its tool. It
exists so that multi-turn environments with tools can be tried and tested on a laptop, with no download. Made from nothing by
`tools/make_tiny_tools.py --seed {seed}`; no data but our own.

Its chat template is Qwen's and Hermes' form with fewer words around it: tools as JSON between `<tools>` tags in a system turn, calls as
`<tool_call>` with a name and arguments as JSON, results as `<tool_response>` in a user turn.

## How it was made

Supervised training on conversations with the tool, {minutes:.0f} minutes of one core's time. No problem is one that the environment poses.

1. {careful} steps of {batch}: one operation a call, and an answer with what the tool said last.
2. {habits} steps with two **bad habits, planted on purpose**, in three demonstrations of four ({share:.0%}). With {hasty}: the
   number at once, right, but more than the model can work out in its head. With {sloppy}: a call with a word too many, which is an error of
   the tool; half of these then do it properly, half give up.

## Measured

On the {held_out} held-out (`test`) problems of `calculator`:

| | greedy | temperature 1 |
|---|---|---|
| right | {greedy_accuracy:.1%} | {sampled_accuracy:.1%} |
| calls an episode | {greedy_calls:.2f} | {sampled_calls:.2f} |
| of these, errors of the tool | {greedy_errors:.2f} | {sampled_errors:.2f} |

What reinforcement learning gains from here is nearly all the habits undone ([docs/multi-turn.md](../../../../docs/multi-turn.md) has
the figures). It shows that a run of several turns with tools learns from its rewards. It shows nothing about reasoning.

## Limits

- It knows the stories of `calculator.py` and one tool. It was never shown another tool, or none, nor a system message.
- `--seed {seed} --threads 1` is the same arithmetic everywhere, but the last bits of floating point sums are not the same on every machine.
"""


if __name__ == "__main__":
    main()
