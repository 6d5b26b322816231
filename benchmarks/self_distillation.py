"""What the policy learns from itself, over three seeds: python -m benchmarks.self_distillation

Teacher `self` in place of every reward: held-out accuracy before the first step and after the last, of the same 512 problems.

- hint: the policy `tiny`, whose teacher is the same policy as it began, with HINT in front of each problem.
- sibling: the policy `reader`, whose teacher is the policy of this very step, shown a reply of the group that was right. `reader` is `tiny`
  after READER_STEPS of supervised training on two things: what `tiny` itself replies to a problem, and to repeat a reply that is shown
  under the problem. `tiny` has never met a text in its prompt and cannot read one: `blind` is one run of it on the same.

Ends with 1 where a seed of `hint` or `sibling` gains less than GAIN. Writes benchmarks/results/self_distillation.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described

SEEDS = (0, 1, 2)
GAIN = 0.05
STEPS = 12
DEADLINE_S = 1800
HINT = (
    "Rosa"  # of thirteen names tried on 256 training problems the one that helps most: 61.7 % right, and 45.7 % without
)
READER_STEPS = 300
COMMON = """
[environment.gsm8k]

[trainer]
learning_rate = 3e-4

[trainer.distillation]
kind = "forward"
alone = true

[evaluation]
problems = 512
"""
HINTED = f"""
[teacher.self]
shows = []
template = "{HINT} {{problem}}"
versions_behind = 1000
"""
SHOWN = """
[teacher.self]
shows = ["sibling"]
template = "{problem}\\n{shown}"
solution = "{shown}"

[checkpoint]
every = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reader", type=Path, help="where `reader` is, or is to be kept")
    wanted = parser.parse_args()
    machine = described()
    with tempfile.TemporaryDirectory() as scratch:
        reader = wanted.reader or Path(scratch) / "reader"
        if not reader.exists():
            make_reader(reader)
        arms = (("hint", "tiny", HINTED, SEEDS), ("sibling", str(reader), SHOWN, SEEDS), ("blind", "tiny", SHOWN, (0,)))
        rows = [
            trained(Path(scratch), what, model, teacher, seed) for what, model, teacher, seeds in arms for seed in seeds
        ]
    console.table(
        ("what", "seed", "before", "after", "seconds"),
        [
            (one["what"], str(one["seed"]), f"{one['before']:.1%}", f"{one['after']:.1%}", f"{one['seconds']:.0f}")
            for one in rows
        ],
    )
    RESULTS.mkdir(exist_ok=True)
    found = {"machine": machine, "steps": STEPS, "rows": rows}
    (RESULTS / "self_distillation.json").write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(0 if all(one["after"] - one["before"] >= GAIN for one in rows if one["what"] != "blind") else 1)


def trained(folder: Path, what: str, model: str, teacher: str, seed: int) -> dict[str, Any]:
    """One run: accuracy before and after, and how long it took."""
    run_file, run = folder / f"{what}-{seed}.toml", folder / f"run-{what}-{seed}"
    preset = ROLLOUTS if model != "tiny" else ""  # which the model of this name brings along
    run_file.write_text(COMMON.replace("[trainer]\n", f"[trainer]\n{preset}") + teacher + (SIZES if preset else ""))
    command = [
        sys.executable, "-m", "atropos_core", "run", str(run_file), "--model", model, "--seed", str(seed), "--steps", str(STEPS),
        "--dir", str(run),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=DEADLINE_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "what": what,
        "seed": seed,
        "before": lines[0]["eval/accuracy"],
        "after": lines[-1]["eval/accuracy"],
        "versions_behind": max(line["teacher/self/versions_behind"] for line in lines[1:]),
        "rewards": [line["reward/mean"] for line in lines[1:]],
        "seconds": sum(line["time/step_s"] for line in lines),
    }


ROLLOUTS = 'devices = ["cpu"]\nloss = "dapo"\nbetas = [0.9, 0.99]\nwarmup_steps = 5\n'
SIZES = (
    '\n[training]\ngroups_per_step = 16\ngroup_size = 8\n\n[sampling]\nmax_tokens = 64\n\n[engine]\ndevices = ["cpu"]\n'
)


def make_reader(directory: Path) -> None:
    """Half of each batch keeps what `tiny` says of itself, half is to be read off the prompt."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
    tiny: Any = importlib.import_module("make_tiny_policy")
    torch.set_num_threads(1)
    origin = tiny.PLUGIN / "tiny"
    tokenizer = Tokenizer.from_file(str(origin / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    torch.manual_seed(0)
    choose = random.Random(0)
    own_problems = [tiny.problem("train", 20_000 + number) for number in range(4096)]
    prompts = [tokenizer.encode(tiny.prompt_text(one)).ids for one in own_problems]
    replies = tiny.answers(model.eval(), prompts, do_sample=True)
    optimizers = tiny.new_optimizers(model.train())
    end = tokenizer.token_to_id(tiny.END)
    for step in range(1, READER_STEPS + 1):
        rows = []
        for number in (choose.randrange(len(prompts)) for _ in range(32)):
            rows.append((prompts[number], [*replies[number], end]))
        for number in range(32):
            record = tiny.problem("train", 40_000 + 32 * step + number)
            reply = tiny.demonstration(record, choose)
            shown = f"{tiny.USER}{record['question']}\n{reply}{tiny.ASSISTANT}"
            rows.append((tokenizer.encode(shown).ids, tokenizer.encode(reply + tiny.END).ids))
        longest = max(len(prompt) + len(reply) for prompt, reply in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, (prompt, reply) in enumerate(rows):
            tokens[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        rate = 1e-3 * min(1.0, step / 20) * (1 - step / (READER_STEPS + 1))
        tiny.learn(model, optimizers, model(input_ids=tokens, labels=labels, use_cache=False).loss, rate)
        if step % 50 == 0:
            console.say(f"reader: step {step} of {READER_STEPS}")
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(origin / name, directory / name)


if __name__ == "__main__":
    main()
