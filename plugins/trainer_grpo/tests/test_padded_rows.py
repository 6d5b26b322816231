"""Sequences that are one to a row give the logprobs and gradients of packed ones, whatever is scored, and in whatever pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.types import KEPT, Ragged, offsets_of
from atropos_trainer_grpo.kept_tokens import kept_rows
from atropos_trainer_grpo.layouts import Layout
from atropos_trainer_grpo.model import open_model, score
from atropos_trainer_grpo.padded_rows import pad, row_microbatches


def cut(batch, vocabulary, seed=3):
    """The batch, with a random set of kept tokens at each sampled token, itself among them."""
    random = np.random.default_rng(seed)
    sets = [
        np.unique(np.append(random.integers(2, vocabulary, 5), token)) if is_sampled else np.zeros(0, np.int64)
        for token, is_sampled in zip(batch.tokens, batch.sampled, strict=True)
    ]
    ragged = Ragged(offsets_of([len(one) for one in sets]), np.concatenate(sets).astype(np.int32))
    return replace(batch, truncated=np.ones(batch.sequences, np.bool_), ragged={KEPT: ragged})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens_per_microbatch": 60, "logprob_chunk": 5},
        {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.05},
        {"loss": "gspo", "tokens_per_microbatch": 90},
    ],
    ids=str,
)
@pytest.mark.parametrize("own_logits", [False, True])
@pytest.mark.parametrize("branches", [False, True])
def test_the_gradient_is_that_of_packed_sequences(gradient, make_batch, make_branches, options, own_logits, branches):
    batch = make_branches() if branches else make_batch()
    loss, flat = gradient(batch, double=True, **options)
    other, again = gradient(batch, double=True, layout="rows", own_logits=own_logits, **options)
    assert other == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(again, flat, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("own_logits", [False, True])
@pytest.mark.parametrize("options", [{}, {"logprob_chunk": 7}, {"entropy_coefficient": 0.1}], ids=str)
def test_the_gradient_over_kept_tokens_is_that_of_packed_sequences(gradient, make_batch, own_logits, options):
    batch = cut(make_batch(), 37)
    loss, flat = gradient(batch, double=True, **options)
    other, again = gradient(batch, double=True, layout="rows", own_logits=own_logits, **options)
    assert other == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(again, flat, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("most", [3, 37])
def test_own_logits_score_as_the_head_does_whatever_is_asked(model_of, make_batch, most):
    """Logprobs, entropy, further tokens (up to the whole vocabulary, of which nothing is left), mass; and the gradient of each."""
    batch = cut(make_batch(), 37)
    rows = np.flatnonzero(batch.sampled)
    kept = kept_rows(batch, rows, "cpu")
    targets = torch.from_numpy(batch.tokens[rows].astype(np.int64))
    others = torch.stack(
        [torch.randperm(37, generator=torch.Generator().manual_seed(i))[:most] for i in range(len(rows))]
    )
    temperature = torch.linspace(0.5, 1.5, len(rows))
    for further, cutting in ((others, None), (None, kept)):
        made = []
        for own_logits, chunk in ((False, 100_000), (True, 100_000), (True, 11)):
            layout = Layout("rows", own_logits)
            model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True, layout=layout).double()
            laid_out = pad(batch.tokens, batch.lengths)
            scored = score(model, laid_out, laid_out.at(rows - 1), targets, temperature, chunk, further, cutting)
            total = scored.logprobs.sum() + 0.3 * scored.entropy.sum()
            if further is not None:
                rest = scored.outside[scored.outside.isfinite()]
                assert len(rest) == (0 if most == 37 else len(rows))
                total = total + 0.1 * scored.others.sum() + rest.sum()
            total.backward()
            flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            made.append([one.detach() for one in scored if one is not None] + [flat])
        for way in made[1:]:
            for one, other in zip(made[0], way, strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_logits_of_all_rows_never_exist_at_once(model_of, make_batch):
    """Nothing that a backward pass keeps, and nothing that it computes, is larger than a piece of logits."""
    batch = make_batch()
    layout = Layout("rows", own_logits=True)
    model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True, layout=layout)
    seen = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, made: seen.append(made.shape[-2]))
    laid_out = pad(batch.tokens, batch.lengths)
    rows = np.flatnonzero(batch.sampled)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(tuple(one.shape)) or one, lambda one: one):
        scored = score(
            model, laid_out, laid_out.at(rows - 1), torch.from_numpy(batch.tokens[rows].astype(np.int64)), None, 16
        )
    assert max(seen) == 16 and len(seen) == -(-len(rows) // 16)
    assert not [shape for shape in kept if len(shape) > 1 and shape[-1] == 37 and shape[0] != 37]
    scored.logprobs.sum().backward()
    assert len(seen) == 2 * -(-len(rows) // 16) and max(seen) == 16


def test_padding_and_other_rows_change_no_logprob(model_of, make_batch):
    batch = make_batch()
    model = open_model(model_of(), dtype="auto", device="cpu", with_weights=True, layout=Layout("rows"))
    rows = np.setdiff1d(np.arange(len(batch.tokens)), batch.offsets[:-1])

    def logprobs(laid_out):
        targets = torch.from_numpy(batch.tokens[rows].astype(np.int64))
        return score(model, laid_out, laid_out.at(rows - 1), targets, None, 100).logprobs.detach()

    whole = pad(batch.tokens, batch.lengths)
    other = whole.tokens.clone()
    padding = np.setdiff1d(np.arange(other.numel()), whole.slots)
    other.view(-1)[padding] = 5
    assert len(padding)
    torch.testing.assert_close(logprobs(whole), logprobs(replace(whole, tokens=other)), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 10_000), limit=st.integers(1, 300), episodes=st.booleans())
def test_every_item_is_in_one_run_whose_rows_are_within_the_limit(seed, limit, episodes):
    random = np.random.default_rng(seed)
    longest = random.integers(1, 60, random.integers(1, 30))
    count = random.integers(1, 4, len(longest)) if episodes else np.ones(len(longest), np.int64)
    order = random.permutation(len(longest))[: random.integers(0, len(longest) + 1)]
    runs = row_microbatches(longest, order, limit, count if episodes else None)
    assert sorted(np.concatenate(runs).tolist() if runs else []) == sorted(order.tolist())
    for run in runs:
        assert len(run) == 1 or count[run].sum() * longest[run].max() <= limit
