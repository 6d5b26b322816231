"""Fixtures: a random tiny model with a tokenizer, and an engine that runs it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from atropos_core.plugins.provider import RunContext
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine

VOCABULARY, EOS = 64, 2


def write_tokenizer(directory: Path) -> None:
    words = {"<pad>": 0, "<unk>": 1, "<end>": EOS} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(directory: Path, kind: str = "qwen3", *, seed: int = 0, scale: float = 8.0, **changes: Any) -> Path:
    """Make a model with random weights whose logits are far apart (`scale`), so that rounding rarely changes a sampled token."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=EOS, pad_token_id=0, bos_token_id=None,
        tie_word_embeddings=True,
    ) | changes  # fmt: skip
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    made = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **shape)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**{"head_dim": 8, **experts, **shape})),
    }
    model: Any = made[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session", name="write_tokenizer")
def write_tokenizer_fixture() -> Callable[[Path], None]:
    return write_tokenizer


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture() -> Callable[..., Path]:
    return make_model  # tests cannot import a conftest under importlib


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def open_engine(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[HFEngine] = []

    async def start(
        model: Path, device: str = "cpu", announced: Any = None, capture: Any = None, **options: Any
    ) -> HFEngine:
        context = RunContext(directory=tmp_path, model=model, devices=(device,), threads=1, announced=announced or {})
        engine = HFEngine(HFOptions(**options), context, capture)
        opened.append(engine)
        await engine.open()
        return engine

    yield start
    for engine in opened:
        await engine.close()


@pytest.fixture
async def engine(open_engine: Callable[..., Any], tiny: Path) -> HFEngine:
    made: HFEngine = await open_engine(tiny)
    return made
