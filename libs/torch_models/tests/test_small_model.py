from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from atropos_torch_models.small_model import small_config, small_model
from tests.models.families import FAMILIES, config_of


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_a_small_copy_that_runs_and_in_which_a_leak_shows(name: str) -> None:
    model: Any = small_model(config_of(name))
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    tokens = torch.randint(3, 640, (1, 70), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 0] = tokens[0, 0] % 600 + 5
    with torch.no_grad():
        logits, changed = (model(input_ids=one, use_cache=False).logits[0, 3] for one in (tokens, other))
    assert logits.isfinite().all() and logits.std() > 0.01
    assert (logits - changed).abs().max() > 0.02 * logits.std(), (
        "another token three places before it changes the logits"
    )


def test_one_layer_of_each_kind_is_left_and_what_names_a_layer_names_it_still() -> None:
    whole = CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=8, mlp_only_layers=[2, 5])
    small: Any = small_config(whole)
    assert small.num_hidden_layers == 2 and small.mlp_only_layers == [1]
    whole = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=12, num_kv_shared_layers=6)
    small = small_config(whole)
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2 and small.num_kv_shared_layers == 2
    assert [layer.head_dim for layer in small.per_layer_config] == [16, 32, 16, 32]
    assert whole.num_hidden_layers == 12 and whole.vocab_size > 640, "the copy leaves it as it was"


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    one, two = (small_model(CONFIG_MAPPING["qwen3"](), seed=3) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
