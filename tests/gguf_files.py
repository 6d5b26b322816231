"""The policy `tiny` as a GGUF file, its matrices in any of ggml's types, with what a test wants changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.plugins.manager import load_plugins

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = {  # of a layer: the name that GGUF has for it
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor of Qwen3, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def write_gguf(
    path: Path,
    kind: str = "F32",
    without: tuple[str, ...] = (),
    more: Mapping[str, np.ndarray] | None = None,
    **changed: Any,
) -> dict[str, np.ndarray]:
    """Write the file, and return what its tensors are dequantized to, by the names of transformers. `without`: tensors and keys that are
    left out; `more`: tensors in float32, by GGUF's names; `changed`: other values of metadata, with `__` for each dot."""
    import gguf
    from gguf.quants import dequantize, quantize
    from safetensors.numpy import load_file

    tiny = load_plugins().resolve_model("tiny").directory
    config = json.loads((tiny / "config.json").read_text())
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    vocabulary = {**{index: text for text, index in tokenizer["model"]["vocab"].items()}, **special}
    architecture = changed.pop("general__architecture", "qwen3")
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        f"{architecture}.vocab_size": config["vocab_size"],
        f"{architecture}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [vocabulary[index] for index in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(config["vocab_size"])],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.chat_template": TEMPLATE,
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    _write_values(writer, {key: value for key, value in values.items() if key not in without})
    tensors = {}
    for name, tensor in load_file(tiny / "model.safetensors").items():
        stored = kind if tensor.ndim == 2 else "F32"
        if gguf_name(name) in without or "tensors" in without:
            continue
        chosen = gguf.GGMLQuantizationType[stored]
        packed = quantize(tensor.astype(np.float32), chosen)
        tensors[name] = dequantize(packed, chosen)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=chosen)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _write_values(writer: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
