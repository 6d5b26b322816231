"""Does the memory plan hold? The trainer's growth of resident memory over that after imports, predicted and measured.

    python -m benchmarks.plan [--only NAME ...]

Random models of 30 M parameters and more; each configuration in a child of its own, two updates, at their highest (VmHWM).
Writes benchmarks/results/plan.json, in which the rows that `--only` leaves out stay as they were; each names its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described

DEADLINE_S = 900
UPDATES = 2
LIBRARIES = "interpreter and libraries"  # what growth is counted from


@dataclass(frozen=True)
class Configuration:
    name: str
    groups: int
    group_size: int
    prompt: int
    reply: int
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    dtype: str = "float32"
    ranks: int = 1


LORA: dict[str, Any] = {"lora": {"rank": 16}}
IN_4_BITS: dict[str, Any] = {"lora": {"rank": 16, "quantization": "nf4"}}
CONFIGURATIONS = [
    Configuration("full, fp32, short", 4, 8, 40, 60),
    Configuration("full, fp32, long, several micro-batches", 2, 2, 128, 512, {"tokens_per_microbatch": 1200}),
    Configuration("full, fp32, long, checkpointing", 2, 2, 128, 896, {"gradient_checkpointing": True}),
    Configuration("full, bf16 with masters, KL", 2, 8, 40, 60, {"kl": {}, "share_prompts": False}, dtype="bfloat16"),
    Configuration("LoRA, fp32", 4, 8, 40, 60, LORA),
    Configuration("LoRA, bf16, long", 1, 2, 128, 896, LORA, dtype="bfloat16"),
    Configuration("LoRA beside a base in 4 bits, fp32", 4, 8, 40, 60, IN_4_BITS, model="qwen3 rounded"),
    Configuration("full, fp32, 8-bit moments", 4, 8, 40, 60, {"optimizer": "adamw_8bit"}),
    Configuration("full, fp32, long replies that share prompts", 2, 8, 128, 128, {"tokens_per_microbatch": 2400}),
    Configuration("full, fp32, Llama, head of its own", 4, 4, 100, 100, {}, model="llama"),
    Configuration("full, fp32, two ranks", 4, 8, 40, 60, ranks=2),
    Configuration("full, bf16 with masters, KL, two ranks", 2, 8, 40, 60, {"kl": {}}, dtype="bfloat16", ranks=2),
    Configuration("full, fp32, LFM2, one sequence to a row", 4, 8, 40, 60, model="lfm2"),
    Configuration("SmolLM2-135M, full, fp32", 2, 4, 64, 128, model="smollm2"),
    Configuration("SmolLM2-135M, LoRA, fp32", 2, 4, 128, 256, LORA, model="smollm2"),
    Configuration(
        "SmolLM2-135M, full, checkpointing", 4, 4, 128, 256, {"gradient_checkpointing": True}, model="smollm2"
    ),
    Configuration(
        "SmolLM2-135M, full, bf16, a sequence at once",
        2,
        4,
        256,
        512,
        {"tokens_per_microbatch": 768},
        "smollm2",
        "bfloat16",
    ),
]
SMOLLM2: dict[str, Any] = {  # the shape of SmolLM2-135M, as its config.json has it
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip


def make_model(directory: Path, kind: str, dtype: str) -> None:
    """A random model, with the tiny policy's tokenizer."""
    import shutil

    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from atropos_env_gsm8k.plugin import HERE
    from benchmarks.trainer_work import SHAPE

    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    if kind == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **ends))
    elif kind == "lfm2":  # three short convolutions to one attention layer
        kinds = ["full_attention" if layer % 4 == 3 else "conv" for layer in range(SHAPE["num_hidden_layers"])]
        shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
        model = Lfm2ForCausalLM(Lfm2Config(**shape, layer_types=kinds, block_auto_adjust_ff_dim=False, **ends))
    elif kind == "smollm2":
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, **ends))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": False, "vocab_size": 16_000}, **ends))
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / "tiny" / name, directory / name)


def context_of(directory: Path, ranks: int) -> Any:
    from atropos_core.plugins.provider import RunContext

    devices = ("cpu",) * ranks
    return RunContext(directory.parent, directory, UPDATES, transport="checkpoint", threads=2, devices=devices)


def predicted(configuration: Configuration, directory: Path) -> tuple[int, list[tuple[str, int]]]:
    """As the run's plan has it."""
    from atropos_core.launch.memory_plan import peak
    from atropos_core.plugins.model_provider import Workload
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.plugin import holds

    workload = Workload(
        context_of(directory, configuration.ranks),
        configuration.groups,
        configuration.group_size,
        configuration.reply,
        0,
        configuration.prompt,
    )
    options = GrpoOptions.model_validate(configuration.options | {"dtype": configuration.dtype})
    parts = [one for one in peak(list(holds(options, workload))) if one.what != LIBRARIES]
    return sum(one.size_bytes for one in parts), [(one.what, one.size_bytes) for one in parts]


def child(directory: Path, configuration: Configuration) -> None:
    """Prints the growth, and what the imports took. Another rank's imports count as ours do."""
    import numpy as np
    import peft  # noqa: F401 - what LoRA imports later counts among the imports
    import torch
    import transformers.models.lfm2.modeling_lfm2
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    from atropos_trainer_grpo import lora  # noqa: F401
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.plugin import build
    from atropos_trainer_grpo.ranks import RankedTrainer
    from benchmarks.resident import highest, settle
    from benchmarks.trainer_work import batch

    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        yield

    async def work() -> None:
        imports = settle()
        options = GrpoOptions.model_validate(
            configuration.options | {"dtype": configuration.dtype, "learning_rate": 1e-4}
        )
        made = build(options, context_of(directory, configuration.ranks))
        await made.open()
        prompts = np.full(configuration.groups, configuration.prompt)
        replies = np.full(configuration.groups * configuration.group_size, configuration.reply)
        for _ in range(UPDATES):
            await made.step(batch(prompts, replies, 16_000), writing)
        others = [one.child.process.pid for one in made._others] if isinstance(made, RankedTrainer) else []
        growth = sum(highest(process) - imports for process in ("self", *others))
        print(json.dumps({"growth": growth, "imports": imports}))
        await made.close()

    torch.set_num_threads(2)
    asyncio.run(work())


def measured(configuration: Configuration, directory: Path) -> dict[str, int]:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.plan", str(directory), json.dumps(asdict(configuration))],
        stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True,
    )  # fmt: skip
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] != "--only":
        child(Path(sys.argv[1]), Configuration(**json.loads(sys.argv[2])))
        return
    from atropos_trainer_grpo.quantize_command import write

    named = [configuration.name for configuration in CONFIGURATIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=named, default=named, metavar="NAME")
    chosen = parser.parse_args().only
    machine, out = described(), RESULTS / "plan.json"
    earlier = json.loads(out.read_text())["configurations"] if len(chosen) < len(named) else []
    rows = {row["name"]: row for row in earlier}
    with tempfile.TemporaryDirectory() as scratch:
        for configuration in (one for one in CONFIGURATIONS if one.name in chosen):
            directory = Path(scratch) / f"{configuration.model}-{configuration.dtype}"
            kind, _, rounded = configuration.model.partition(" ")
            if not (whole := Path(scratch) / f"{kind}-{configuration.dtype}").exists():
                make_model(whole, kind, configuration.dtype)
            if rounded and not directory.exists():
                write(whole, directory)
            total, parts = predicted(configuration, directory)
            found = measured(configuration, directory)
            made = {"predicted": total, "parts": dict(parts), **found, "commit": machine["commit"]}
            rows[configuration.name] = asdict(configuration) | made
            console.say(f"{configuration.name}: {total / 1e6:.0f} MB predicted, {found['growth'] / 1e6:.0f} measured")
    ordered = [rows[name] for name in named if name in rows]
    console.table(
        ("configuration", "predicted, MB", "measured, MB", "off by"),
        [
            (row["name"], f"{row['predicted'] / 1e6:.0f}", f"{row['growth'] / 1e6:.0f}", f"{row['predicted'] / row['growth'] - 1:+.1%}")
            for row in ordered
        ],
    )  # fmt: skip
    out.write_text(json.dumps({"machine": machine, "configurations": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
