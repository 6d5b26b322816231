"""A packed forward pass is the same as one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from atropos_trainer_grpo.model import open_model, score
from atropos_trainer_grpo.packed_rows import microbatches, pack


def reference(directory, sequences):
    """Logprobs by transformers' own forward, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    rows = []
    for tokens in sequences:
        ids = torch.tensor(np.asarray(tokens), dtype=torch.long)[None]
        rows.append(torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0])
    return model, torch.cat(rows)


def packed(model, batch, group, chunk=8192):
    packing = pack(batch.tokens, batch.lengths, share=group is not None)
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
        model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True).double()
        scored = packed(model, batch, None, chunk)[1]
        scored.logprobs.square().sum().backward()
        results.append((scored.logprobs.detach(), scored.entropy, model.get_input_embeddings().weight.grad))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieces, atol=1e-9, rtol=1e-9)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), sequences=st.integers(1, 9), shared=st.booleans())
def test_every_token_finds_its_place_in_the_packed_and_in_the_padded_layout(seed, sequences, shared):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, sequences)
    tokens = random.integers(0, 2, int(lengths.sum())).astype(np.int32)  # few values: long common beginnings
    packing = pack(tokens, lengths, share=shared)
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


@st.composite
def groups_of_sequences(draw):
    """Tokens, lengths and groups: few token values, so that beginnings in common are long."""
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    group = np.sort(random.integers(0, draw(st.integers(1, 6)), draw(st.integers(1, 24)))).astype(np.int32)
    prompts = {number: random.integers(0, 2, random.integers(1, 30)) for number in np.unique(group)}
    rows = [np.concatenate([prompts[number], random.integers(0, 2, random.integers(1, 40))]) for number in group]
    return np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows]), group


def in_order(lengths, order, limit):
    """How many runs it takes to fill them one after another, counting every token."""
    runs, filled = 0, limit + 1
    for length in lengths[order]:
        runs, filled = (runs + 1, length) if filled + length > limit else (runs, filled + length)
    return runs


@settings(max_examples=200)
@given(made=groups_of_sequences(), limit=st.integers(1, 300), share=st.booleans())
def test_micro_batches_hold_every_sequence_once_within_the_limit_and_in_no_more_runs_than_one_by_one(
    made, limit, share
):
    tokens, lengths, group = made
    starts = np.cumsum(lengths) - lengths
    order = np.arange(len(lengths))
    runs = microbatches(lengths, order, limit, *((tokens, group) if share else ()))
    assert np.sort(np.concatenate(runs)).tolist() == order.tolist()
    assert len(runs) <= in_order(lengths, order, limit)
    for run in runs:
        joined = np.concatenate([tokens[starts[i] : starts[i] + lengths[i]] for i in run])
        count = pack(joined, lengths[run], share=share).tokens.numel()
        assert count <= limit or len(run) == 1


def test_micro_batches_are_of_near_token_counts():
    lengths = np.full(10, 30)
    assert [len(run) for run in microbatches(lengths, np.arange(10), 240)] == [5, 5]
    uneven = np.random.default_rng(0).integers(20, 300, 128)
    counts = [int(uneven[run].sum()) for run in microbatches(uneven, np.arange(128), 4096)]
    assert len(counts) == -(-uneven.sum() // 4096)
    assert min(counts) > 0.9 * max(counts)


def test_whole_groups_fill_micro_batches_that_their_order_would_leave_half_empty():
    lengths = np.array([60, 60, 40, 40])
    assert [run.tolist() for run in microbatches(lengths, np.arange(4), 100)] == [[0, 2], [1, 3]]


def test_a_prompt_counts_once_and_its_group_stays_together():
    prompt = np.arange(2, 52)
    rows = [np.concatenate([prompt + group, [1] * 10]) for group in (0, 100) for _ in range(4)]
    tokens, lengths, group = (
        np.concatenate(rows).astype(np.int32),
        np.full(8, 60),
        np.repeat([0, 1], 4).astype(np.int32),
    )
    assert [run.tolist() for run in microbatches(lengths, np.arange(8), 100, tokens, group)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert len(microbatches(lengths, np.arange(8), 100)) == 8


def test_a_sequence_beyond_the_limit_gets_a_micro_batch_of_its_own():
    lengths = np.array([5, 9, 30, 2, 2, 7])
    assert [run.tolist() for run in microbatches(lengths, np.arange(6), 12)] == [[0], [1], [2], [3, 4, 5]]
    assert microbatches(lengths, np.arange(0), 12) == []


@pytest.mark.parametrize("shared", [False, True])
def test_attention_pads_less_than_one_row_in_twenty_for_replies_of_very_different_lengths(shared):
    random = np.random.default_rng(0)
    lengths = (50 + random.lognormal(4.3, 0.5, 64)).astype(np.int64)
    tokens = np.full(int(lengths.sum()), 3, np.int32)
    for begin in np.cumsum(lengths) - lengths:
        tokens[begin + 50 :][:1] = random.integers(10**6)
    packing = pack(tokens, lengths, share=shared)
    assert 0 <= packing.padding < 0.05
