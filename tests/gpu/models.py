"""Random models, made from a config: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging

TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
)
VOCABULARY = 640  # of the small model

SMALL = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def qwen3(shape: dict[str, Any]) -> Qwen3Config:
    return Qwen3Config(**shape, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def large(parameters: float) -> LlamaConfig:
    """The shape of Llama 3.2 3B, narrowed to the smallest width that has so many parameters."""
    vocabulary, layers, head = (128256, 28, 128) if parameters >= 1e9 else (8192, 4, 64)
    heads = 2
    while True:
        hidden, shared = heads * head, heads // 2  # two query heads share keys and values
        layer = hidden * head * 2 * (heads + shared) + 3 * hidden * (8 * hidden // 3) + 2 * hidden
        if vocabulary * hidden + layers * layer + hidden >= parameters:
            break
        heads += 2
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=8 * hidden // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, head_dim=head, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def make(
    config: PretrainedConfig,
    dtype: str,
    device: str,
    directory: Path,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Write a model directory, each matrix of a layer as `change` has it. Returns the bytes of its weights."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if change is not None:
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                parameter.data.copy_(change(parameter.data))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(TOKENIZER)
    size: int = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    return size
