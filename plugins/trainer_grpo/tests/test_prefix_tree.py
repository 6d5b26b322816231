"""The shared beginning of sequences exists once, wherever they diverge, and computing it once changes no gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_trainer_grpo import forward_passes, lora
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from atropos_trainer_grpo.losses import LOSSES
from atropos_trainer_grpo.model import open_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.packed_rows import microbatches, pack
from atropos_trainer_grpo.prefix_tree import LEAST_SAVED, tree_of
from atropos_trainer_grpo.update import Update

KINDS = [
    {"loss": "grpo"},
    {"loss": "gspo", "clip_low": 0.9, "clip_high": 5.0},
    {"loss": "dapo", "kl": {"coefficient": 0.1, "estimator": "k3"}, "entropy_coefficient": 0.1},
    {"loss": "cispo", "tokens_per_microbatch": 90},
    {"loss": "grpo", "old_logprobs": "recompute", "correction": {"kind": "sequence_mis", "high": 1e9}},
]


def laid_out(rows):
    lengths = np.array([len(row) for row in rows])
    return np.concatenate(rows).astype(np.int32), np.cumsum(lengths) - lengths, lengths


@settings(max_examples=200)
@given(seed=st.integers(0, 10_000), sequences=st.integers(1, 14), values=st.integers(1, 3))
def test_a_path_is_its_sequence_and_what_is_below_a_node_follows_it(seed, sequences, values):
    random = np.random.default_rng(seed)
    rows = [random.integers(0, values, random.integers(1, 60)) for _ in range(sequences)]
    tokens, starts, lengths = laid_out(rows)
    tree = tree_of(tokens, starts, lengths)
    for number, row in enumerate(rows):
        pieces = [rows[tree.sequence[node]][tree.begin[node] : tree.end[node]] for node in tree.path(number)]
        assert np.concatenate(pieces).tolist() == row.tolist()
    for node, parent in enumerate(tree.parent.tolist()):
        assert parent < node and (parent < 0 or tree.begin[node] == tree.end[parent])
        below = [other for other in range(len(tree.parent)) if node in ancestors(tree, other)]
        assert below == list(range(node + 1, node + 1 + len(below)))
        ending = int((tree.last == node).sum())
        children = int((tree.parent == node).sum())
        assert children + ending == 1 or (tree.end[node] - tree.begin[node]) * (children + ending - 1) >= LEAST_SAVED
    order = tree.order.tolist()
    assert sorted(order) == list(range(sequences))
    for place, common in enumerate(tree.shared().tolist()):
        assert common <= lengths[order[place]]
        if place:
            assert rows[order[place]][:common].tolist() == rows[order[place - 1]][:common].tolist()
    assert lengths.sum() - tree.shared().sum() == tree.tokens


def ancestors(tree, node):
    found = []
    while (node := int(tree.parent[node])) >= 0:
        found.append(node)
    return found


def test_eight_branches_that_share_three_quarters_take_a_third_of_the_tokens():
    random = np.random.default_rng(0)
    trunk = random.integers(0, 1000, 300)
    tokens, starts, lengths = laid_out([np.concatenate([trunk, random.integers(0, 1000, 100)]) for _ in range(8)])
    assert tree_of(tokens, starts, lengths).tokens == 300 + 8 * 100
    assert tree_of(tokens, starts, lengths, share=False).tokens == 3200


def test_a_conversation_that_later_turns_go_on_with_is_one_line_of_nodes():
    talk = np.random.default_rng(0).integers(0, 1000, 200)
    tokens, starts, lengths = laid_out([talk[:60], talk[:120], talk[:200], talk[:60]])
    tree = tree_of(tokens, starts, lengths)
    assert tree.tokens == 200
    assert tree.order.tolist() == [0, 3, 1, 2]
    assert tree.shared().tolist() == [0, 60, 60, 120]


def test_beginnings_are_shared_between_groups_and_branches_of_a_group_stay_beside_one_another():
    random = np.random.default_rng(0)
    system, prompts = random.integers(0, 1000, 50), random.integers(0, 1000, (2, 20))
    trunks = random.integers(0, 1000, (2, 40))
    rows = [
        np.concatenate([system, prompts[group], trunks[trunk], random.integers(0, 1000, 10)])
        for group in range(2)
        for trunk in (0, 1, 0, 1)
    ]
    tokens, _, lengths = laid_out(rows)
    group = np.repeat([0, 1], 4).astype(np.int32)
    assert pack(tokens, lengths, share=True).tokens.numel() == 50 + 2 * (20 + 2 * (40 + 2 * 10))
    runs = microbatches(lengths, np.arange(8), 130, tokens, group)
    assert [run.tolist() for run in runs] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("options", KINDS, ids=lambda one: "-".join(map(str, one.values()))[:40])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_separate_sequences(gradient, make_branches, options, seed):
    batch = make_branches(seed)
    joined = pack(batch.tokens, batch.lengths, share=True).tokens.numel()
    assert joined < 0.75 * len(batch.tokens)
    exact = (
        1e-9 if not {"kl", "old_logprobs"} & options.keys() else 1e-6
    )  # what a pass before the update computes is kept in float32
    for double, bound in ((True, exact), (False, 1e-5)):
        loss, together = gradient(batch, double=double, **options)
        expected, apart = gradient(batch, double=double, share_prompts=False, **options)
        assert loss == pytest.approx(expected, abs=bound, rel=bound)
        scale = max(float(apart.abs().max()), 1.0)
        torch.testing.assert_close(together, apart, atol=bound * scale, rtol=1e-4)


def test_the_gradient_of_an_adapter_is_that_of_separate_sequences(model_of, make_branches):
    batch, found = make_branches(5), []
    for share in (True, False):
        torch.manual_seed(3)
        options = GrpoOptions(lora=LoraOptions(rank=4), share_prompts=share)
        model = lora.attach(
            open_model(model_of(), dtype="auto", device="cpu", with_weights=True), options.lora, model_of()
        )
        with torch.no_grad():  # zero at first, and A has no gradient then
            for name, tensor in lora.tensors(model).items():
                if "lora_B" in name:
                    tensor.copy_(torch.randn(tensor.shape) * 0.05)
        update = Update(model, Optimizer(model.named_parameters(), options), options, LOSSES["grpo"], batch, "cpu", 0)
        [whole] = update.minibatches()
        update.backward(whole)
        found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def test_logits_of_a_shared_token_are_computed_once_where_it_has_one_temperature():
    places = np.array([0, 1, 2, 0, 1, 5])
    once, of = forward_passes.distinct_rows(places, np.full(6, 1.0, np.float32), worth=True)
    assert once.tolist() == [0, 1, 2, 5] and of.tolist() == [0, 1, 2, 0, 1, 3]
    two = np.array([1, 1, 1, 0.5, 1, 1], np.float32)
    assert forward_passes.distinct_rows(places, two, worth=True) == (slice(None), None)
    assert forward_passes.distinct_rows(np.arange(6), two, worth=True) == (slice(None), None)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("seed", range(3))
def test_flash_attention_gives_the_gradient_of_the_padded_layout(gradient, make_branches, kind, seed):
    batch = make_branches(seed)
    for double, bound in ((True, 1e-9), (False, 1e-5)):
        loss, found = gradient(batch, double=double, kind=kind, attention="flash")
        expected, padded = gradient(batch, double=double, kind=kind, attention="padded")
        assert loss == pytest.approx(expected, abs=bound, rel=bound)
        torch.testing.assert_close(found, padded, atol=bound * max(float(padded.abs().max()), 1.0), rtol=1e-4)


def test_the_runs_of_each_level_are_all_that_is_below_it_and_its_keys():
    common = [np.arange(50), np.arange(50, 70)]
    rows = [np.concatenate([*common[:n], np.full(20, 100 + i)]) for i, n in enumerate((1, 2, 2))]
    tokens, lengths = np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows])
    own, first, second = pack(tokens, lengths, share=True, attention="flash").levels
    assert own.query_ends.tolist() == own.key_ends.tolist() == [0, 50, 70, 90, 110, 130]
    assert first.keys.tolist() == list(range(50)) and first.queries.tolist() == list(range(50, 130))
    assert second.key_ends.tolist() == [0, 20] and second.query_ends.tolist() == [0, 40]
    below = pack(tokens, lengths, share=True, attention="flash").tokens[0, second.queries].tolist()
    assert below == [101] * 20 + [102] * 20
    assert len(pack(tokens, lengths, share=False, attention="flash").levels) == 1


@pytest.mark.parametrize(
    ("branches", "own", "leveled"), [(8, 200, True), (8, 4000, False), (1, 200, False), (60, 30, False)], ids=str
)
def test_attention_goes_by_levels_where_the_padded_layout_would_have_each_key_many_times(branches, own, leveled):
    random = np.random.default_rng(0)
    trunk = random.integers(0, 1000, 1000)
    tokens, _, lengths = laid_out([np.concatenate([trunk, random.integers(0, 1000, own)]) for _ in range(branches)])
    packing = pack(tokens, lengths, share=True, attention="auto")
    assert bool(packing.levels) == leveled
    assert bool(packing.buckets) != leveled
    assert not pack(tokens, lengths, share=True).levels
