"""Small runs of the real model, and the logprobs that plain transformers has for their tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atropos_core.types import Floats, Tokens
from atropos_records.rollout_records import RolloutRecords
from tests.e2e.runs import finish

VOWELS = f"{Path(__file__).parent / 'vowels.py'}:Vowels"
SMALL = (
    "--engine", "hf", "--steps", "2", "--set", "training.groups_per_step=2", "--set", "training.group_size=2",
    "--set", "sampling.max_tokens=6", "--set", "evaluation.problems=0", "--set", "checkpoint.every=1",
    "--set", "trainer.tokens_per_microbatch=256",
)  # fmt: skip
FULL = (*SMALL, "--deterministic", "--set", "trainer.learning_rate=1e-5")
# At this rate two updates change what a greedy evaluation says.
LORA = (
    *SMALL, "--set", "trainer.lora.learning_rate=1e-3", "--set", "trainer.warmup_steps=0", "--set", "evaluation.problems=2",
    "--set", "evaluation.max_tokens=16",
)  # fmt: skip


class Runs(dict[str, Path]):
    """A run of two steps over each bridge, made when a test asks for it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self._folder = model, folder

    def __missing__(self, bridge: str) -> Path:
        run = self._folder / bridge
        finish(run, "run", *self.arguments(bridge), "--dir", str(run))
        self[bridge] = run
        return run

    def arguments(self, bridge: str) -> tuple[str, ...]:
        return ("--model", str(self.model), "--env", VOWELS, "--bridge", bridge, *(LORA if bridge == "lora" else FULL))

    def remove(self, bridge: str) -> None:
        """Its checkpoints take 3 GB."""
        shutil.rmtree(self.pop(bridge))


def plain(directory: Path) -> Any:
    """Return the model of a directory in plain transformers, with peft if it is an adapter."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    kind = AutoPeftModelForCausalLM if (directory / "adapter_config.json").is_file() else AutoModelForCausalLM
    return kind.from_pretrained(directory, dtype=torch.float32).eval()


def logprobs(model: Any, ids: Tokens, temperature: float = 1.0) -> Floats:
    """f32[T] of these ids, without cache; 0 for the first."""
    whole = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=whole, use_cache=False).logits[0].float()
        table = (logits / temperature).log_softmax(-1)
    return np.concatenate([[0.0], table[:-1].gather(1, whole[0, 1:, None])[:, 0].numpy()]).astype(np.float32)


def largest_difference(run: Path, step: int, model: Any, temperature: float = 1.0) -> float:
    """Return the largest |engine - model| over the tokens that a step sampled, in nats. All must be of the version before it."""
    tokens = RolloutRecords(run).step(step).tokens
    assert tokens is not None and tokens.sequences == 4
    worst = 0.0
    for number in range(tokens.sequences):
        one = tokens.sequence(number)
        assert one.sampled.any() and set(one.versions[one.sampled].tolist()) == {step - 1}
        worst = max(worst, float(np.abs(one.logprobs - logprobs(model, one.ids, temperature))[one.sampled].max()))
    return worst
