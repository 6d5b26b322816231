"""A packed forward pass is the same as one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from atropos_trainer_grpo.model import open_model, score
from atropos_trainer_grpo.packing import microbatches, pack


def reference(directory, sequences):
    """Logprobs by transformers' own forward, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    rows = []
    for tokens in sequences:
        ids = torch.tensor(np.asarray(tokens), dtype=torch.long)[None]
        rows.append(torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0])
    return model, torch.cat(rows)


def packed(model, batch, group, chunk=8192):
    packing = pack(batch.tokens, batch.lengths, group=group)
    rows = np.setdiff1d(np.arange(len(batch.tokens)), batch.offsets[:-1])
    targets = torch.from_numpy(batch.tokens[rows].astype(np.int64))
    return packing, score(model, packing, packing.at(rows - 1), targets, torch.ones(len(rows)), chunk)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("shared", [False, True])
def test_packed_logprobs_and_gradients_equal_those_of_single_sequences(kind, shared, model_of, make_batch):
    directory = model_of(kind)
    batch = make_batch(groups=5, size=6)
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    single, expected = reference(directory, sequences)
    model = open_model(directory, dtype="auto", device="cpu", with_weights=True)
    packing, scored = packed(model, batch, batch.group if shared else None)
    assert (packing.tokens.numel() < len(batch.tokens)) is shared
    assert len(packing.buckets) > 1  # both the cutting and the joining of buckets are exercised
    torch.testing.assert_close(scored.logprobs, expected, atol=1e-5, rtol=0)

    weights = torch.linspace(-1, 1, len(expected))
    (scored.logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        scale = float(theirs[name].grad.abs().max())
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5 * max(scale, 1), rtol=1e-4, msg=name)


def test_sequences_of_a_packing_do_not_see_one_another(model_of, make_batch):
    batch = make_batch()
    model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True)
    before = packed(model, batch, None)[1].logprobs.detach()
    changed = batch.tokens.copy()
    changed[batch.offsets[3] : batch.offsets[4]] = 2
    after = packed(model, replace(batch, tokens=changed), None)[1].logprobs.detach()
    ends = np.cumsum(batch.lengths - 1)
    others = np.r_[0 : ends[2], ends[3] : ends[-1]]
    assert torch.equal(before[others], after[others])


def test_chunks_of_logits_change_no_logprob_and_no_gradient(model_of, make_batch):
    batch = make_batch()
    results = []
    for chunk in (8192, 7):
        model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True)
        scored = packed(model, batch, None, chunk)[1]
        scored.logprobs.square().sum().backward()
        results.append((scored.logprobs.detach(), scored.entropy, model.get_input_embeddings().weight.grad))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieces, atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), sequences=st.integers(1, 9), shared=st.booleans())
def test_every_token_finds_its_place_in_the_packed_and_in_the_padded_layout(seed, sequences, shared):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, sequences)
    tokens = random.integers(0, 2, int(lengths.sum())).astype(np.int32)  # few values: long common beginnings
    group = np.sort(random.integers(0, 3, sequences)).astype(np.int32)
    packing = pack(tokens, lengths, group=group if shared else None)
    flat = packing.tokens[0].numpy()
    assert (flat[packing.slots] == tokens).all()
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert (packing.positions[0].numpy()[packing.slots] == positions).all()
    assert (packing.queries[packing.query_home].numpy() == np.arange(len(flat))).all()
    assert (packing.keys[packing.key_home].numpy() == np.arange(len(flat))).all()
    assert len(packing.queries) == sum(bucket.segments * bucket.queries for bucket in packing.buckets)
    assert len(packing.keys) == sum(bucket.segments * bucket.keys for bucket in packing.buckets)

    seen = seen_by(packing)
    starts = np.cumsum(lengths) - lengths
    for begin, length in zip(starts, lengths, strict=True):
        for t in range(length):
            history = packing.slots[begin : begin + t + 1]
            assert seen[packing.slots[begin + t]] == sorted(history)


def seen_by(packing):
    """For every packed token, the packed tokens that attention shows it."""
    seen, q_begin, k_begin = {}, 0, 0
    homes = {int(row): token for token, row in enumerate(packing.query_home)}
    for bucket in packing.buckets:
        for s in range(bucket.segments):
            keys = packing.keys[k_begin : k_begin + bucket.keys]
            for q in range(bucket.queries):
                visible = keys[: q + 1] if bucket.mask is None else keys[bucket.mask[s, 0, q]]
                if q_begin + q in homes:
                    seen[homes[q_begin + q]] = sorted(visible.tolist())
            q_begin, k_begin = q_begin + bucket.queries, k_begin + bucket.keys
    return seen


def test_micro_batches_hold_every_sequence_once_and_respect_the_limit():
    lengths = np.array([5, 9, 30, 2, 2, 7])
    runs = microbatches(lengths, np.arange(6), 12)
    assert np.concatenate(runs).tolist() == list(range(6))
    assert [run.tolist() for run in runs] == [[0], [1], [2], [3, 4, 5]]
    assert microbatches(lengths, np.arange(0), 12) == []
