"""Tensors are named, shaped and valued as in the files that transformers writes, and become the model's own again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from atropos_torch_models.stored_tensors import conversions, converted_shapes, stored_tensors

SHAPE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=2, num_experts_per_tok=2,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    n_routed_experts=12, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1, num_key_value_heads=4,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=12, moe_intermediate_size=16, tie_word_embeddings=True),
    "mixtral": dict(num_local_experts=12),
    "olmoe": dict(num_experts=12),
    "deepseek_v3": LATENT,
    "glm4_moe": dict(n_routed_experts=12, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1),
    "nemotron_h": dict(
        n_routed_experts=12, moe_intermediate_size=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, ssm_state_size=16,
        layers_block_type=["mamba", "attention", "moe", "mamba"], num_hidden_layers=4,
    ),
    "gpt_oss": dict(num_local_experts=12),
    "qwen3": {},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_is_stored_as_is_what_transformers_writes_and_it_comes_back(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | FAMILIES[family]))
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for here in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        stored = dict(stored_tensors(here))
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[name], one) for name, one in written.items())
        shapes = dict(stored_tensors(here, shapes=True))
        assert {name: one.shape for name, one in shapes.items()} == {name: one.shape for name, one in written.items()}
        assert all(one.is_meta for one in shapes.values())

        own = dict(here.named_parameters())
        made: dict[str, torch.Tensor] = {}
        for conversion in conversions(here, reversed(written)):  # in any order: experts 2 and 10 are put in theirs
            made |= conversion.tensors(written.__getitem__)
        assert own.keys() <= made.keys()
        assert all(torch.equal(made[name], one) for name, one in own.items())
        described = {name: (one.dtype, one.shape) for name, one in written.items()}
        sizes = {name: one.shape for _, part in converted_shapes(here, described) for name, one in part.items()}
        assert sizes == {name: one.shape for name, one in made.items()}


def test_names_that_no_model_has_stay_as_they_are(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE, num_experts=4))
    (one,) = conversions(model, ["model.layers.0.extra"])
    assert list(one.tensors(lambda name: torch.zeros(2))) == ["model.layers.0.extra"]
    plain = nn.Linear(2, 3)
    assert [name for name, _ in stored_tensors(plain)] == ["weight", "bias"]
    assert [one.target for one in conversions(plain, ["weight", "bias"])] == ["bias", "weight"]
