"""Random tiny models of the families that vLLM and transformers both know: two layers, float32, with a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("llama3", "qwen2", "qwen3")
VOCABULARY, EOS = 160, 2
# vLLM's attention on a CPU wants heads of 32, 64, ... numbers: hidden_size / num_attention_heads
POSITIONS = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "eos_token_id": EOS,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def make_model(
    directory: Path, family: str, *, seed: int = 0, scale: float = 4.0, ends: bool = True, **changes: Any
) -> Path:
    """Random weights, with logits some nats apart (`scale`). Llama 3 has its rope scaling, Qwen2 biases that are not zero
    and tied embeddings, Qwen3 norms of queries and keys that are not one. Without `ends` no token stops a reply.
    `changes` are over the config's fields."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(_config(family, changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(eos_token_id=EOS if ends else None, pad_token_id=0)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory, ends=ends)
    return directory


def _config(family: str, changes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    if family == "llama3":
        return LlamaConfig(**{**_SHAPE, "rope_parameters": dict(_LLAMA3), "tie_word_embeddings": False, **changes})
    if family == "qwen2":
        return Qwen2Config(**{**_SHAPE, "tie_word_embeddings": True, **changes})
    if family == "qwen3":
        return Qwen3Config(**{**_SHAPE, "head_dim": 32, "tie_word_embeddings": False, **changes})
    if family == "qwen3_moe":  # only where a test names it
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return Qwen3MoeConfig(**{**_SHAPE, **experts, "head_dim": 32, "tie_word_embeddings": False, **changes})
    raise ValueError(f"there is no family {family!r}: {', '.join(FAMILIES)}")


# Sizes that vLLM's kernels for a CPU take: heads of 32, and latent attention of DeepSeek's own widths.
_KERNELS = {
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "head_dim": 32, "attention_head_dim": 32, "global_head_dim": 64,
    "kv_channels": 32, "swa_head_dim": 32, "rotary_dim": 16, "num_key_value_heads": 1, "num_kv_heads": 1,
    "num_global_key_value_heads": 1, "swa_num_key_value_heads": 1, "swa_num_attention_heads": 2,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "qk_head_dim": 96, "v_head_dim": 32,
}  # fmt: skip


def make_family(directory: Path, name: str, *, seed: int = 0) -> Any:
    """Write the small copy of a family of tests/models/families.py, with weights in which a mistake shows, and return the model."""
    from atropos_torch_models.small_model import VOCABULARY as WORDS
    from atropos_torch_models.small_model import small_model
    from tests.models.families import config_of

    own = ("head_dim",) if name == "mamba2" else ()  # which is not of attention there
    model = small_model(config_of(name), seed, {size: value for size, value in _KERNELS.items() if size not in own})
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory, WORDS)
    return model


def write_tokenizer(directory: Path, vocabulary: int = VOCABULARY, *, ends: bool = True) -> None:
    """One word per id, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<unk>": 1, "<end>": EOS} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>" if ends else None,
        "pad_token": "<pad>",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_adapter(
    directory: Path, model: Path, *, rank: int = 4, alpha: float = 8.0, seed: int = 0, targets: Any = "all-linear"
) -> Path:
    """A random peft adapter, by default of every linear layer, far from doing nothing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(directory)
    return directory
