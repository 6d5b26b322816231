"""Model directories with the shape of a public model, and no weights: config.json, a header of safetensors with a hole for its
data, and a small tokenizer of the same family."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tests.families import write

QWEN = {"vocab_size": 151_936, "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 1}
QWEN2 = {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32_768}
QWEN3 = {
    **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40_960, "head_dim": 128,
    "num_key_value_heads": 8,
}  # fmt: skip


def widths(hidden: int, inner: int, layers: int, heads: int, keys: int | None = None) -> dict[str, int]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return sizes if keys is None else {**sizes, "num_key_value_heads": keys}


# As config.json of each model on the Hugging Face hub has it.
SHAPES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8_192, "vocab_size": 49_152,
        "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 2, **widths(576, 1_536, 30, 9, 3),
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {**QWEN2, **widths(896, 4_864, 24, 14, 2)},
    "Qwen/Qwen2.5-1.5B-Instruct": {**QWEN2, **widths(1_536, 8_960, 28, 12, 2)},
    "Qwen/Qwen2.5-3B-Instruct": {**QWEN2, **widths(2_048, 11_008, 36, 16, 2)},
    "Qwen/Qwen2.5-7B-Instruct": {
        **QWEN2, **widths(3_584, 18_944, 28, 28, 4), "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B": {**QWEN3, **widths(1_024, 3_072, 28, 16)},
    "Qwen/Qwen3-1.7B": {**QWEN3, **widths(2_048, 6_144, 28, 16)},
    "Qwen/Qwen3-4B": {**QWEN3, **widths(2_560, 9_728, 36, 32)},
    "Qwen/Qwen3-8B": {**QWEN3, **widths(4_096, 12_288, 36, 32), "tie_word_embeddings": False},
}  # fmt: skip


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter: a Llama, with biases of qwen2 and the norms of qwen3."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    query, key = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        rows = {"q": query, "k": key, "v": key}
        found |= {f"{at}.self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
        found |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        found |= {f"{at}.self_attn.o_proj.weight": (hidden, query), f"{at}.mlp.down_proj.weight": (hidden, inner)}
        found |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if config["model_type"] == "qwen2":
            found |= {f"{at}.self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
        if config["model_type"] == "qwen3":
            found |= {f"{at}.self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
    return found


def write_shape(model: str, directory: Path, **changed: Any) -> Path:
    """Write a directory like that of `model`, with some values of its config changed, and return it. The file with the weights takes no
    disk."""
    config = SHAPES[model] | changed
    write("qwen", directory)
    (directory / "config.json").write_text(json.dumps(config))
    begin, entries = 0, {}
    for name, shape in tensors(config).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + begin)
    return directory
