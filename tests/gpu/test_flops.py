"""FLOPs of an update, compared with those that torch counts and with a sum by hand."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import trainer_work
from tests.gpu.flops import Counts, counts_of, product_flops_s, update_flops

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
TOKENS = 20


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_that_torch_counts(rank, tied):
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied, attn_implementation="eager"))
    if rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits.sum().backward()
    # Eager attention computes every pair of tokens, and all tokens have logits here.
    assert update_flops(SHAPE, Counts(TOKENS, TOKENS * TOKENS, TOKENS), rank) == counted.get_total_flops()


def test_flops_of_a_small_shape_by_hand():
    # A layer has 32*64 + 2*32*32 + 64*32 + 3*32*48 = 10,752 weights: 6 FLOPs for each and each token. Causal attention over 20 tokens
    # sees 210 keys: 12 * 64 FLOPs for each in each layer. The head: 6 * 32 * 50 for each of 18 tokens.
    expected = 6 * 3 * 10_752 * 20 + 3 * 12 * 64 * 210 + 6 * 32 * 50 * 18
    assert update_flops(SHAPE, Counts(20, 210, 18)) == expected


def test_shared_tokens_are_counted_once_if_they_are_computed_once():
    batch = trainer_work.batch(np.full(1, 40), np.full(2, 30), 50)
    assert counts_of(batch, share=False) == Counts(140, 2 * 70 * 71 // 2, 60)
    assert counts_of(batch, share=True) == Counts(100, 70 * 71 // 2 + sum(range(41, 71)), 60)


def test_a_plain_product_is_timed():
    assert 1e6 < product_flops_s("cpu") < 1e14
