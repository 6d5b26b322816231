"""A tiny mixture of experts with the tokenizer of `tiny`, and an environment whose scores differ for a model that knows nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"

ENVIRONMENT = """
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task


class Letters(Environment):
    \"\"\"The more different characters, the better.\"\"\"

    def tasks(self, split):
        numbers = range(16) if split == "train" else range(16, 20)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},)) for n in numbers]

    async def score(self, task, reply):
        return Score(len(set(reply["content"])) / 32)
"""


def make_moe(directory: Path, family: str = "qwen3_moe", *, seed: int = 0, gain: float = 4.0, **changes: Any) -> Path:
    """Make a random model directory of 4 experts a layer, of which each token uses 2, in float32. The higher the `gain` of its
    experts, the more another choice of them changes logits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((TINY / "config.json").read_text())
    shape: dict[str, Any] = dict(
        vocab_size=config["vocab_size"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=config["eos_token_id"], pad_token_id=config["pad_token_id"],
    ) | changes  # fmt: skip
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # experts and tokens that differ
                parameter.mul_(20.0 if "gate.weight" in name else gain if "experts" in name else 4.0)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    for path in TINY.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, directory)
    return directory
