"""Training on what was sampled with top_p, top_k and min_p: against enumeration in float64, and against plain masked softmaxes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from atropos_core.errors import ConfigError, DataError
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.types import KEPT, Batch, Column, Kept, Ragged, offsets_of
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.kept_tokens import KeptRows, kept_rows
from atropos_trainer_grpo.logprobs import token_logprobs
from atropos_trainer_grpo.plugin import check

from .conftest import VOCABULARY, doubled

PROMPT, END, LENGTH = [5, 9, 2], 1, 3
CUTS = [
    {"top_p": 0.6},
    {"top_k": 3},
    {"min_p": 0.3},
    {"top_k": 4, "top_p": 0.7},
    {"top_k": 4, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.25, "top_k": 5},
]


def kept_of(p: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[int]:
    """By definition, token by token."""
    order = sorted(range(len(p)), key=lambda token: -p[token])
    left = [token for token in order if p[token] >= min_p * p[order[0]]][: top_k or None]
    total, mass, kept = sum(p[token] for token in left), 0.0, []
    for token in left:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += p[token]
    return sorted(kept)


class Enumerated:
    """Every reply that a cut policy can give, up to LENGTH tokens: its logprobs, and what was kept at each of its tokens."""

    def __init__(self, model, temperature: float, **cut) -> None:
        self.temperature = temperature
        self.replies: list[list[int]] = []
        self.sets: list[list[list[int]]] = []
        open_replies: list[tuple[list[int], list[list[int]]]] = [([], [])]
        while open_replies:
            reply, sets = open_replies.pop()
            if reply and (len(reply) == LENGTH or reply[-1] == END):
                self.replies.append(reply)
                self.sets.append(sets)
                continue
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + reply])).logits[0, -1]
            kept = kept_of(torch.softmax(logits / temperature, -1).numpy(), **cut)
            open_replies += [([*reply, token], [*sets, kept]) for token in kept]
        self.rewards = np.random.default_rng(3).normal(size=len(self.replies))

    def logprobs(self, model, *, whole: bool = False) -> list[torch.Tensor]:
        """[T] of each reply, with a gradient; over the kept tokens, or over all."""
        made = []
        for reply, sets in zip(self.replies, self.sets, strict=True):
            logits = model(torch.tensor([PROMPT + reply])).logits[0, len(PROMPT) - 1 : -1] / self.temperature
            rows = []
            for at, (token, kept) in enumerate(zip(reply, sets, strict=True)):
                among = logits[at] if whole else logits[at][torch.tensor(kept)]
                rows.append(logits[at, token] - among.logsumexp(0))
            made.append(torch.stack(rows))
        return made

    def batch(self, model) -> Batch:
        """All replies as one group; the advantage of each is its reward times its probability."""
        with torch.no_grad():
            logprobs = [row.numpy() for row in self.logprobs(model)]
        rows = [PROMPT + reply for reply in self.replies]
        count, prompt = len(rows), np.zeros(len(PROMPT))
        sampled = np.concatenate([np.arange(len(row)) >= len(PROMPT) for row in rows])
        sizes = np.concatenate([[*prompt, *map(len, sets)] for sets in self.sets]).astype(np.int64)
        ids = np.concatenate([kept for sets in self.sets for kept in sets]).astype(np.int32)
        weights = [reward * np.exp(row.sum()) for reward, row in zip(self.rewards, logprobs, strict=True)]
        return Batch(
            tokens=np.concatenate(rows).astype(np.int32),
            offsets=offsets_of([len(row) for row in rows]),
            sampled=sampled,
            trained=sampled.copy(),
            logprobs=np.concatenate([np.concatenate([prompt, row]) for row in logprobs]),
            has_logprobs=np.ones(count, np.bool_),
            policy_version=np.zeros(len(sampled), np.int32),
            advantages=np.where(sampled, np.repeat(weights, [len(row) for row in rows]), 0.0),
            temperature=np.full(count, self.temperature, np.float32),
            truncated=np.ones(count, np.bool_),
            group=np.zeros(count, np.int32),
            version=1,
            ragged={KEPT: Ragged(offsets_of(sizes), ids)},
        )


def reference_model(model_of):
    return doubled(AutoModelForCausalLM.from_pretrained(model_of()))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.75])
@pytest.mark.parametrize("loss", ["reinforce", "dr_grpo"])
def test_the_expected_gradient_is_that_of_the_cut_policys_expected_reward(gradient, model_of, cut, temperature, loss):
    model = reference_model(model_of)
    replies = Enumerated(model, temperature, **cut)
    assert len(replies.replies) > 5
    logprobs = replies.logprobs(model)
    probabilities = torch.stack([row.sum().exp() for row in logprobs])
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    (probabilities @ torch.from_numpy(replies.rewards)).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    options = {"loss": loss, "average": "constant", "loss_length": 1, "old_logprobs": "rollout"}
    batch = replies.batch(model)
    _, found = gradient(batch, double=True, **options)
    found = -found * batch.sequences  # the update goes down, and averages over sequences
    scale = expected.abs().max()
    torch.testing.assert_close(found / scale, expected / scale, atol=2e-6, rtol=0)  # temperatures are float32
    _, whole = gradient(replace(batch, ragged={}, truncated=~batch.truncated), double=True, **options)
    assert (-whole * batch.sequences - expected).abs().max() > 1e-2 * scale, "without what was kept it is another one"


def test_a_set_of_one_token_has_logprob_zero_and_no_gradient(gradient, model_of):
    model = reference_model(model_of)
    replies = Enumerated(model, 1.0, top_k=1)
    batch = replies.batch(model)
    assert not batch.logprobs.any() and len(replies.replies) == 1
    _, found = gradient(batch, double=True, loss="reinforce")
    assert not found.any()


def test_ratios_to_an_older_policy_have_mean_one_over_the_kept_tokens_and_the_kept_mass_over_all(model_of):
    """E over mu of pi / mu is 1 if both are renormalised over the same tokens, else it is the mass that pi has there."""
    model = reference_model(model_of)
    replies = Enumerated(model, 1.0, top_p=0.7)
    with torch.no_grad():
        old = [row.sum() for row in replies.logprobs(model)]
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double())
        new = [row.sum() for row in replies.logprobs(model)]
        whole = [row.sum() for row in replies.logprobs(model, whole=True)]
    of = [sum(float(o.exp() * (n - o).exp()) for n, o in zip(rows, old, strict=True)) for rows in (new, whole)]
    assert of[0] == pytest.approx(1.0, abs=1e-12) and of[1] < 0.95


def rows_of(sets: list[list[int]]) -> KeptRows:
    sizes = np.array([len(one) for one in sets])
    return KeptRows(
        offsets_of(sizes).tolist(),
        torch.from_numpy(np.repeat(np.arange(len(sets)), sizes)),
        torch.tensor([token for one in sets for token in one]),
        torch.from_numpy(sizes > 0),
    )


def case():
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 11, dtype=torch.float64)
    hidden = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    random = np.random.default_rng(1)
    sets = [sorted(random.choice(11, size, replace=False).tolist()) for size in (3, 0, 1, 11, 2, 0, 5, 7, 1)]
    targets = torch.tensor([random.choice(one or range(11)) for one in sets])
    return head, hidden, targets, torch.linspace(0.5, 1.5, 9), sets


@pytest.mark.parametrize("chunk", [100, 9, 4, 1])
def test_scores_are_those_of_a_softmax_over_the_kept_logits(chunk):
    head, hidden, targets, temperature, sets = case()
    scored = token_logprobs(hidden, head, targets, temperature, chunk, kept=rows_of(sets))
    logits = head(hidden) / temperature[:, None]
    with torch.no_grad():
        mass = torch.tensor(
            [torch.softmax(row, -1)[one or slice(None)].sum() for row, one in zip(logits, sets, strict=True)]
        )
    for at, one in enumerate(sets):
        among = one or list(range(11))
        distribution = torch.distributions.Categorical(logits=logits[at, among])
        place = torch.tensor(among.index(int(targets[at])))
        torch.testing.assert_close(scored.logprobs[at], distribution.log_prob(place))
        torch.testing.assert_close(scored.entropy[at], distribution.entropy())
    torch.testing.assert_close(scored.mass, mass)
    assert not scored.mass.requires_grad


@pytest.mark.parametrize("chunk", [100, 4])
def test_gradients_over_kept_tokens_pass_gradcheck(chunk):
    head, hidden, targets, temperature, sets = case()

    def compute(hidden, weight, bias):
        module = torch.nn.Linear(6, 11, dtype=torch.float64)
        del module.weight, module.bias
        module.weight, module.bias = weight, bias
        scored = token_logprobs(hidden, module, targets, temperature, chunk, kept=rows_of(sets))
        return scored.logprobs, scored.entropy

    assert torch.autograd.gradcheck(
        compute, (hidden, head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_())
    )


def with_kept(batch: Batch, seed: int = 0, most: int = 6) -> Batch:
    """The batch with a random set of kept tokens at each sampled token, its own among them."""
    random = np.random.default_rng(seed)
    sets = [
        np.unique([token, *random.integers(0, VOCABULARY, random.integers(0, most))]) if sampled else []
        for token, sampled in zip(batch.tokens, batch.sampled, strict=True)
    ]
    ragged = Ragged(offsets_of([len(one) for one in sets]), np.concatenate(sets).astype(np.int32))
    return replace(batch, truncated=np.ones(batch.sequences, np.bool_), ragged={KEPT: ragged})


async def on_policy(trainer, batch, gate) -> Batch:
    """With the trainer's own logprobs over the kept tokens, as an engine with its weights would send them."""
    metrics = await trainer.step(batch, gate)
    assert metrics["grad_norm"] == 0
    own = (await trainer.token_values())["trainer_logprobs"]
    return replace(batch, logprobs=np.where(batch.sampled, own, 0).astype(np.float32))


async def test_alignment_and_ratios_are_of_the_kept_tokens_and_the_metrics_say_how_much_was_cut(
    open_trainer, make_batch, gate
):
    trainer = await open_trainer(learning_rate=0.0)
    plain = make_batch()
    still = with_kept(replace(plain, advantages=np.zeros_like(plain.advantages)))
    batch = replace(await on_policy(trainer, still, gate), advantages=plain.advantages)
    metrics = await trainer.step(batch, gate)
    assert metrics["alignment/max_abs_logprob_diff"] < 1e-5
    assert metrics["alignment/fresh_tokens"] == batch.sampled.sum() and metrics["alignment/unchecked_share"] == 0
    assert "alignment/truncated_share" not in metrics
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    sizes = batch.kept_sizes[batch.trained]
    sequences = np.split(batch.tokens, batch.offsets[1:-1])
    whole = np.concatenate(await trainer.logprobs(sequences))[batch.trained]
    assert metrics["truncation/share"] == 1.0
    assert metrics["truncation/kept_tokens"] == pytest.approx(sizes.mean())
    assert metrics["truncation/single_share"] == pytest.approx((sizes == 1).mean())
    mass = np.exp(whole - batch.logprobs[batch.trained]).mean()  # pi(a) = mu(a) times the mass
    assert metrics["truncation/kept_mass"] == pytest.approx(mass, rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"share_prompts": False}, {"tokens_per_microbatch": 40}, {"logprob_chunk": 7}], ids=str
)
async def test_packing_and_chunks_change_no_gradient(gradient, make_branches, options):
    batch = with_kept(make_branches())
    loss, flat = gradient(batch)
    other, again = gradient(batch, **options)
    assert other == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(again, flat, atol=2e-5, rtol=1e-4)


async def test_a_kl_term_is_between_policy_and_reference_over_the_kept_tokens(open_trainer, make_batch, gate):
    """Given logprobs of the reference are of its whole distribution, so they are computed anew: KL to itself is 0."""
    trainer = await open_trainer(learning_rate=0.0, kl={"coefficient": 0.1})
    batch = with_kept(make_batch())
    given = Column("token", np.full(len(batch.tokens), -3, np.float32), np.ones(len(batch.tokens), np.bool_))
    metrics = await trainer.step(replace(batch, columns={"ref_logprobs": given}), gate)
    assert metrics["kl/reference_k3"] == pytest.approx(0.0, abs=1e-6)


async def test_a_correction_weighs_by_the_ratio_over_the_kept_tokens(open_trainer, make_batch, gate):
    run = {"max_staleness": 1}
    trainer = await open_trainer(learning_rate=0.0, run=run)
    plain = make_batch()
    still = with_kept(replace(plain, advantages=np.zeros_like(plain.advantages)))
    own = await on_policy(trainer, still, gate)
    shifted = replace(own, advantages=plain.advantages, logprobs=np.minimum(own.logprobs + np.float32(0.1), 0))
    metrics = await trainer.step(shifted, gate)
    gap = (shifted.logprobs - own.logprobs)[own.trained]
    assert metrics["correction/mean"] == pytest.approx(np.exp(-gap.astype(np.float64)).mean(), rel=1e-5)


async def test_truncated_sequences_without_kept_tokens_are_refused(open_trainer, make_batch, gate):
    batch = replace(make_batch(), truncated=np.arange(12) < 5)
    with pytest.raises(
        DataError, match="5 of 12 sequences were sampled with top_p, top_k or min_p, and do not say"
    ) as error:
        await (await open_trainer()).step(batch, gate)
    assert "give the kept tokens" in str(error.value) and gate.entered == 0


async def test_a_mixed_batch_is_trained_as_each_sequence_was_sampled(gradient, make_batch):
    plain = make_batch()
    cut = with_kept(plain)
    half = np.arange(12) % 2 == 0
    column = cut.ragged[KEPT]
    sizes = np.where(np.repeat(half, plain.lengths), np.diff(column.offsets), 0)
    kept = column.values[np.repeat(np.repeat(half, plain.lengths), np.diff(column.offsets))]
    mixed = replace(cut, truncated=half, ragged={KEPT: Ragged(offsets_of(sizes), kept)})
    together = gradient(mixed, loss="reinforce")[1]
    apart = sum(
        gradient(of.select(np.flatnonzero(which)), loss="reinforce")[1] * which.sum()
        for of, which in ((cut, half), (plain, ~half))
    )
    torch.testing.assert_close(together * 12, apart, atol=2e-5, rtol=1e-4)


def test_distillation_is_refused_before_a_run_that_cuts_distributions(tmp_path):
    load = Workload(RunContext(tmp_path, tmp_path), 1, 2, 8, 2)
    options = GrpoOptions(distillation={"kind": "reverse"})
    check(options, load)
    with pytest.raises(ConfigError, match=r"trainer.distillation compares .* would be biased") as refused:
        check(options, replace(load, truncated=True))
    assert "top_p = 1" in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [{}, {"old_logprobs": "rollout"}, {"missing_logprobs": "refuse"}, {"old_logprobs": "recompute", "correction": {}}],
    ids=str,
)
def test_ratios_and_corrections_go_with_a_run_that_cuts_distributions(tmp_path, options):
    check(GrpoOptions(**options), Workload(RunContext(tmp_path, tmp_path), 1, 2, 8, 2, truncated=True))


def test_no_kept_tokens_cost_nothing(make_batch):
    batch = make_batch()
    assert kept_rows(batch, np.arange(len(batch.tokens)), "cpu") is None
    head, hidden, targets, temperature, _ = case()
    assert token_logprobs(hidden, head, targets, temperature, 100).mass is None
    assert Kept.joined(4, [(0, None)]) is None
