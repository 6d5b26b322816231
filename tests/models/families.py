"""Families of causal language models of transformers, with the settings of a released model if the defaults are not those of one."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_MAMBA_OR_ATTENTION = ["linear_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    # full attention
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "glm": {}, "glm4": {}, "olmo": {}, "olmo2": {}, "smollm3": {}, "seed_oss": {},
    "ernie4_5": {},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
    "head_dim": 128},
    "gpt_neox": {}, "gpt2": {}, "phi": {}, "gptj": {}, "opt": {}, "bloom": {}, "falcon": {}, "mpt": {}, "stablelm": {}, "starcoder2": {},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0156},
    "cohere": {}, "nanochat": {}, "helium": {}, "arcee": {}, "apertus": {}, "hyperclovax": {"logits_scaling": 8.0}, "youtu": {},
    "minicpm3": {},
    # windows, chunks, sinks, capped logits
    "mistral": {}, "ministral3": {}, "phi3": {}, "gemma2": {}, "gemma3_text": {}, "gemma3n_text": {},
    "gemma4_text": {"final_logit_softcapping": 30.0}, "olmo3": {}, "exaone4": {}, "cohere2": {}, "gpt_oss": {}, "mimo_v2_flash": {},
    "llama4_text": {}, "vaultgemma": {}, "cwm": {}, "granite_swa": {}, "afmoe": {},
    # mixtures of experts
    "qwen2_moe": {}, "qwen3_moe": {}, "mixtral": {}, "olmoe": {}, "glm4_moe": {}, "minimax_m2": {}, "granitemoe": {}, "phimoe": {},
    "jetmoe": {},
    "ernie4_5_moe": {}, "flex_olmo": {}, "solar_open": {}, "hy_v3": {},
    "deepseek_v2": {"num_experts_per_tok": 6}, "deepseek_v3": {}, "deepseek_v32": {}, "glm4_moe_lite": {},
    # state next to attention, or in place of it
    "qwen3_5_text": {}, "qwen3_5_moe_text": {}, "qwen3_next": {}, "olmo_hybrid": {}, "kimi_linear": {}, "minimax": {},

    "granitemoehybrid": {"position_embedding_type": "rope",
        "layer_types": _MAMBA_OR_ATTENTION * 16, "rope_parameters": _ROPE, "logits_scaling": 8.0},
    "falcon_h1": {"lm_head_multiplier": 0.5}, "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}, "lfm3": {}, "zaya": {}, "nemotron_h": {}, "zamba2": {},
    "bamba": {"attn_layer_indices": [9, 18, 27]}, "jamba": {}, "mamba": {}, "falcon_mamba": {}, "mamba2": {},
    "recurrent_gemma": {}, "rwkv": {},
}  # fmt: skip


# Words of the reason for which a family is refused.
REFUSED: dict[str, str] = {
    "deepseek_v32": "spread",
    "nemotron_h": "spread",  # a decode step does not bound the time step as the pass over a prompt does
    "zamba2": "spread",
    "recurrent_gemma": "get_seq_length",
    "rwkv": "past_key_values",
}


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a family, of the sizes of a released model."""
    config: PreTrainedConfig = CONFIG_MAPPING[name](**FAMILIES[name])
    return config
