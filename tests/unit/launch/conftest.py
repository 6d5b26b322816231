"""The shape of a small real model, which takes no disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

HIDDEN, LAYERS, WIDE, KEY, VOCABULARY = 576, 30, 1536, 192, 49152


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M without its weights: a config and the header of a file of tensors."""
    directory = tmp_path_factory.mktemp("smollm")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16", "head_dim": 64,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (KEY, HIDDEN) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, WIDE)
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    tensors = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory
