"""The losses against independent float64 numpy code, exact values, finite differences and invariances."""

from inspect import signature

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_testing import ContractBroken, check, loss_contract
from atropos_trainer_grpo import config, plugin
from atropos_trainer_grpo.check_loss import check_loss
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.losses import LOSSES, Clip, Rows, Surrogate, policy_gradient, register, token_weights
from atropos_trainer_grpo.update import clip_of

LENGTH = 16
NAMES = list(LOSSES)
CLIP = {
    "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0),
    "reinforce": (0.0, 0.0), "sapo": (0.0, 0.0), "vespo": (0.0, 0.0), "luspo": (2e-3, 2.5e-3), "kpop": (0.0, 0.0),
    "gmpo": (1 - np.exp(-0.4), np.exp(0.4) - 1), "dppo": (0.0, 0.0),
}  # fmt: skip


def coin(p, q):
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def of_papers(name, new, old, a, whole):
    """Value and slope of one token by a loss without a clip, at the papers' own options; `whole`: the product of the
    sequence's ratios."""
    r = np.exp(new - old)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + np.exp(-tau * (r - 1)))
        return -4 / tau * p * a, -4 * p * (1 - p) * r * a
    if name == "vespo":
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        phi = whole**k * np.exp(decay * (1 - whole))
        return -phi * a * new, -phi * a
    p, q = np.exp(new), np.exp(old)
    if name == "dppo":
        kept = not (p - q > 0.2 if a > 0 else q - p > 0.2)
        return -r * a * kept, -r * a * kept
    kept = max(coin(p, q), coin(q, p)) <= 0.1
    return -r * a * kept, -r * a * kept


def oracle(name, new, old, advantages, mask, lengths, dual=None):
    """Loop by loop, as the papers write it: the value, and its gradient by each token's logprob."""
    low, high = CLIP[name]
    sums, counts, slopes, begin = [], [], np.zeros(len(new)), 0
    for length in lengths:
        members = [t for t in range(begin, begin + length) if mask[t]]
        begin += length
        if not members:
            continue
        of_sequence = np.exp(sum(new[t] - old[t] for t in members) / len(members))
        total = 0.0
        bounded_logs = [
            min(new[t] - old[t], np.log1p(high)) if advantages[t] > 0 else max(new[t] - old[t], np.log1p(-low))
            for t in members
        ]
        for t in members:
            a, r = advantages[t], of_sequence if name in ("gspo", "luspo") else np.exp(new[t] - old[t])
            if name in ("sapo", "vespo", "kpop", "dppo"):
                value, slopes[t] = of_papers(name, new[t], old[t], a, of_sequence ** len(members))
                total += value
            elif name == "cispo":
                weight = min(max(r, 1 - low), 1 + high)
                total, slopes[t] = total - weight * a * new[t], -weight * a
            elif name == "gmpo":
                value = -a * np.exp(sum(bounded_logs) / len(members))
                stopped = new[t] - old[t] > np.log1p(high) if a > 0 else new[t] - old[t] < np.log1p(-low)
                total, slopes[t] = total + value, 0.0 if stopped else value
            elif name == "reinforce":
                total, slopes[t] = total - a * new[t], -a
            else:
                bounded = min(max(r, 1 - low), 1 + high)
                best = min(r * a, bounded * a)
                if dual is not None and a < 0:
                    best = max(best, dual * a)
                total, slopes[t] = total - best, -r * a if best == r * a else 0.0
        sums.append(total)
        counts.append(len(members))
    begin = 0
    sequences, tokens = max(len(sums), 1), max(sum(counts), 1)
    divide = {
        "grpo": lambda n: sequences * n, "gspo": lambda n: sequences * n, "dr_grpo": lambda n: sequences * LENGTH,
        "dapo": lambda n: tokens, "cispo": lambda n: tokens, "reinforce": lambda n: sequences,
        "sapo": lambda n: sequences * n, "vespo": lambda n: tokens, "luspo": lambda n: sequences, "kpop": lambda n: tokens,
        "gmpo": lambda n: sequences * n, "dppo": lambda n: tokens,
    }[name]  # fmt: skip
    for length in lengths:
        count = sum(mask[begin : begin + length])
        slopes[begin : begin + length] /= divide(max(count, 1))
        begin += length
    return sum(total / divide(count) for total, count in zip(sums, counts, strict=True)), slopes


def example(seed, sequences=5):
    """Ratios near the bounds of each loss are among them; an advantage for each token."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 12, sequences)
    total = int(lengths.sum())
    old = random.normal(-2, 0.4, total)
    new = np.minimum(old + random.normal(0, random.choice([0.4, 3e-4, 2.0]), total), -1e-3)
    return new, old, random.normal(size=total), random.random(total) < 0.7, lengths


def computed(name, new, old, advantages, mask, lengths, dual=None):
    """As the trainer does it: the trained rows, weighed and summed."""
    loss, offsets = LOSSES[name], np.concatenate([[0], np.cumsum(lengths)])
    weights = torch.from_numpy(token_weights(loss.average, mask, offsets, LENGTH).astype(np.float64))[mask]
    owner = np.repeat(np.arange(len(lengths)), lengths)[mask]
    variable = torch.tensor(new, requires_grad=True)
    rows = Rows(
        variable[torch.from_numpy(mask)],
        torch.as_tensor(old[mask]),
        torch.as_tensor(advantages[mask]),
        torch.from_numpy(np.unique(owner, return_inverse=True)[1]),
    )
    value = (loss(rows, loss.clip._replace(dual=dual)).values * weights).sum()
    value.backward()
    return float(value.detach()), variable.grad.numpy()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_each_loss_and_its_gradient_equal_an_independent_float64_computation(name, seed):
    value, slopes = computed(name, *example(seed))
    expected, gradient = oracle(name, *example(seed))
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "luspo"])
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_dual_clip_bounds_what_a_negative_advantage_can_do(name, seed):
    value, slopes = computed(name, *example(seed), dual=1.5)
    expected, gradient = oracle(name, *example(seed), dual=1.5)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_keeps_the_contract_that_strangers_must(name):
    loss_contract(name)()


def one(name, ratio, advantage, dual=None):
    """Loss and gradient of one token at this ratio, with the logprob 0."""
    logprobs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old, a = torch.tensor([-np.log(ratio)]), torch.tensor([advantage], dtype=torch.float64)
    made = LOSSES[name](
        Rows(logprobs, old, a, torch.zeros(1, dtype=torch.int64)), LOSSES[name].clip._replace(dual=dual)
    )
    made.values.sum().backward()
    return float(made.values.detach()), float(logprobs.grad), float(made.ratio), made.clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (2.0, -1.0, 2.0, True),  # a bad token became likelier: pushed down with full strength
        (0.5, -1.0, 0.8, False),  # it became rarer already: enough
        (2.0, 1.0, -1.2, False),
        (0.5, 1.0, -0.5, True),
        (1.1, 1.0, -1.1, True),
        (1.0, -1.0, 1.0, True),
    ],
)
def test_the_clip_holds_for_both_signs_of_the_advantage(ratio, advantage, expected, moves):
    value, slope, seen, clipped = one("grpo", ratio, advantage)
    assert value == pytest.approx(expected)
    assert seen == pytest.approx(ratio)
    assert (slope != 0) is moves
    assert bool(clipped) is not moves


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "moves"),
    [
        (2.0, -1.0, 2.0, True),
        (4.0, -1.0, 3.0, False),  # verl's c = 3: the loss stops there
        (0.5, -1.0, 0.8, False),
        (4.0, 1.0, -1.2, False),  # a positive advantage has the bound that it had
        (0.5, 1.0, -0.5, True),
    ],
)
def test_dual_clip_at_exact_values(ratio, advantage, expected, moves):
    value, slope, _, clipped = one("grpo", ratio, advantage, dual=3.0)
    assert value == pytest.approx(expected)
    assert (slope != 0) is moves
    assert bool(clipped) is not moves


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (7.0, 5.0)])
def test_cispo_bounds_the_weight_and_never_the_gradient(ratio, weight):
    for advantage in (-2.0, 2.0):
        value, slope, _, clipped = one("cispo", ratio, advantage)
        assert value == 0.0, "the logprob is 0"
        assert slope == pytest.approx(-weight * advantage)
        assert clipped is None


def test_gspo_is_the_gradient_of_the_papers_sequence_ratio_where_advantages_are_of_sequences():
    random = np.random.default_rng(4)
    lengths = np.array([3, 1, 6])
    old = torch.tensor(random.normal(-2, 0.4, 10))
    new = (old + torch.tensor(random.normal(0, 4e-4, 10))).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5])
    sequence = torch.repeat_interleave(torch.arange(3), torch.from_numpy(lengths))
    total, begin = 0.0, 0
    for length, advantage in zip(lengths, advantages, strict=True):  # equation 5, token for token
        s = (new[begin : begin + length] - old[begin : begin + length]).mean().exp()
        total = total - torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage) / 3
        begin += length
    (expected,) = torch.autograd.grad(total, new)
    given_ = LOSSES["gspo"](Rows(new, old, advantages[sequence], sequence), Clip(3e-4, 4e-4))
    weights = 1 / (3.0 * torch.from_numpy(lengths)[sequence].double())
    value = (given_.values * weights).sum()
    (gradient,) = torch.autograd.grad(value, new)
    assert float(value.detach()) == pytest.approx(float(total.detach()), abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "values"), [
    ("sapo", {"temperature_pos": 3.0}), ("sapo", {"temperature_neg": 3.0}), ("vespo", {"k_pos": 1.0}),
    ("vespo", {"lambda_pos": 1.0}), ("vespo", {"k_neg": 1.0}), ("vespo", {"lambda_neg": 1.0}), ("kpop", {"threshold": 1e-3}),
])  # fmt: skip
def test_an_option_of_a_loss_acts_on_the_sign_of_advantage_that_its_name_says(name, values):
    plain, other = LOSSES[name], LOSSES[name].having(**values)
    changed = {}
    for advantage in (2.0, -2.0):
        rows = Rows(
            torch.tensor([-1.0]), torch.tensor([-1.6]), torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64)
        )
        changed[advantage > 0] = float(plain(rows, plain.clip).values) != float(other(rows, plain.clip).values)
    [option] = values
    assert changed == {True: not option.endswith("_neg"), False: not option.endswith("_pos")}
    loss_contract(name)()
    assert all(finding.ok is not False for finding in check_loss(other))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_soft_weights_are_one_where_nothing_moved_and_fade_where_it_did(advantage):
    for name in ("sapo", "vespo"):
        weights = []
        for ratio in (1e-3, 1.0, 40.0):
            logprobs = torch.tensor([-3.0 + np.log(ratio) / 2], dtype=torch.float64)
            old = torch.tensor([-3.0 - np.log(ratio) / 2], dtype=torch.float64)
            rows = Rows(logprobs, old, torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64))
            weights.append(float(LOSSES[name](rows, Clip(0.2, 0.2)).weight))
        assert weights[1] == pytest.approx(1.0)
        assert max(weights[0], weights[2]) < 0.05


def test_kpop_leaves_a_rare_token_its_ratio_and_a_likely_one_not():
    """Both ratios are 2: from 0.001 to 0.002, and from 0.45 to 0.9."""
    new = torch.tensor([2e-3, 0.9]).log().requires_grad_()
    made = LOSSES["kpop"](
        Rows(new, torch.tensor([1e-3, 0.45]).log(), torch.ones(2), torch.tensor([0, 1])), Clip(0.2, 0.2)
    )
    made.values.sum().backward()
    assert made.clipped.tolist() == [False, True]
    assert new.grad.tolist() == pytest.approx([-2.0, 0.0])


def test_gmpo_is_the_gradient_of_the_papers_product_where_advantages_are_of_sequences():
    random = np.random.default_rng(5)
    lengths, bounds = [3, 1, 6, 4], (np.exp(-0.4), np.exp(0.4))
    old = torch.tensor(random.normal(-2, 0.4, sum(lengths)))
    new = (old + torch.tensor(random.normal(0, 0.6, sum(lengths)))).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, -0.5, 2.0], dtype=torch.float64)
    total, begin = 0.0, 0
    for length, advantage in zip(lengths, advantages, strict=True):  # the objective, token for token
        r, sign = (new[begin : begin + length] - old[begin : begin + length]).exp(), advantage.sign()
        smaller = torch.minimum(r**sign, r.clamp(*bounds) ** sign) ** sign
        total = total - smaller.prod() ** (1 / length) * advantage / len(lengths)
        begin += length
    (expected,) = torch.autograd.grad(total, new)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    given_ = LOSSES["gmpo"](Rows(new, old, advantages[sequence], sequence), LOSSES["gmpo"].clip)
    value = (given_.values / (4.0 * torch.tensor(lengths)[sequence])).sum()
    (gradient,) = torch.autograd.grad(value, new)
    assert 0 < given_.clipped.sum() < len(new)
    assert float(value.detach()) == pytest.approx(float(total.detach()), abs=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.3), ("kl", 0.15)])
def test_dppo_leaves_out_tokens_that_would_move_further_beyond_a_threshold_of_their_sign(divergence, threshold):
    """Of 0.2 -> 0.6 and back both distances are beyond the thresholds: 0.4, and KLs of 0.335 and 0.382."""
    up, down = (np.log(0.6), np.log(0.2)), (np.log(0.2), np.log(0.6))
    new, old = (torch.tensor([up[at], up[at], down[at], down[at]]) for at in (0, 1))
    rows = Rows(new.requires_grad_(), old, torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.zeros(4, dtype=torch.int64))
    values = {"divergence": divergence, "threshold_pos": threshold, "threshold_neg": threshold}
    assert LOSSES["dppo"].having(**values)(rows, Clip(0.2, 0.2)).clipped.tolist() == [True, False, False, True]
    for wide, left in (("threshold_pos", [False, False, False, True]), ("threshold_neg", [True, False, False, False])):
        made = LOSSES["dppo"].having(**values | {wide: 0.9})
        given_ = made(rows, Clip(0.2, 0.2))
        assert given_.clipped.tolist() == left
        (slopes,) = torch.autograd.grad(given_.values.sum(), new)
        assert (slopes == 0).tolist() == left
        assert all(finding.ok is not False for finding in check_loss(made))


def test_dppos_divergences_are_those_of_two_coins():
    apart = 0.05 * np.log(0.05 / 0.3) + 0.95 * np.log(0.95 / 0.7)
    rows = Rows(torch.tensor([0.3]).log(), torch.tensor([0.05]).log(), torch.ones(1), torch.zeros(1, dtype=torch.int64))
    for divergence, at in (("tv", 0.25), ("kl", apart)):
        for threshold, left in ((at * 0.999, True), (at * 1.001, False)):
            made = LOSSES["dppo"].having(divergence=divergence, threshold_pos=threshold)
            assert made(rows, Clip(0.2, 0.2)).clipped.tolist() == [left]


def test_luspo_is_gspo_with_each_sequence_times_its_length():
    new, old, advantages, _, lengths = example(3)
    mask, advantages = np.ones(len(new), np.bool_), np.repeat(advantages[: len(lengths)], lengths)
    value, slopes = computed("luspo", new, old, advantages, mask, lengths)
    expected, begin = 0.0, 0
    for length, advantage in zip(lengths, advantages[np.cumsum(lengths) - 1], strict=True):
        s = np.exp(np.mean(new[begin : begin + length] - old[begin : begin + length]))
        best = min(s * advantage, min(max(s, 1 - 2e-3), 1 + 2.5e-3) * advantage)
        expected -= length * best / len(lengths)
        moves = best == s * advantage
        np.testing.assert_allclose(
            slopes[begin : begin + length], -s * advantage * moves / len(lengths), rtol=1e-6, atol=1e-9
        )
        begin += length
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_options_bounds_go_before_the_losses_own():
    assert clip_of(GrpoOptions(loss="dapo"), LOSSES["dapo"]) == (0.2, 0.28, None)
    assert clip_of(GrpoOptions(), LOSSES["grpo"]) == (0.2, 0.2, None)
    assert clip_of(GrpoOptions(clip_low=0.1), LOSSES["grpo"]) == (0.1, 0.1, None)
    assert clip_of(GrpoOptions(clip_low=0.1, dual_clip=3.0), LOSSES["dapo"]) == (0.1, 0.28, 3.0)
    assert clip_of(GrpoOptions(clip_high=0.5), LOSSES["grpo"]) == (0.2, 0.5, None)
    assert clip_of(GrpoOptions(loss="gspo"), LOSSES["gspo"]) == (3e-4, 4e-4, None)


def test_weights_say_how_the_averages_differ():
    mask = np.array([False, True, True, False, True, True, True, True])  # |o| = 2, 4
    offsets = np.array([0, 3, 8])
    each = token_weights("sequence", mask, offsets)
    assert np.allclose(each[mask], [1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])
    assert np.allclose(token_weights("token", mask, offsets)[mask], 1 / 6)
    assert np.allclose(token_weights("constant", mask, offsets, 10)[mask], 1 / 20)  # TRL's B * L_max, not verl's L
    assert np.allclose(token_weights("sum", mask, offsets)[mask], 1 / 2)
    assert not each[~mask].any()
    assert each.dtype == np.float32


@pytest.mark.parametrize(("average", "weight"), [("sequence", 1.0), ("token", 1.0), ("constant", 0.1), ("sum", 1.0)])
def test_a_batch_of_one_token_has_its_whole_weight(average, weight):
    made = token_weights(average, np.array([False, True]), np.array([0, 2]), 10)
    assert made.tolist() == pytest.approx([0.0, weight])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), extra=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_untrained_tokens_and_sequences_change_nothing(name, seed, extra):
    new, old, advantages, mask, lengths = example(seed)
    more = sum(extra)
    longer = [np.concatenate([column, np.full(more, 0.5)]) for column in (new, old, advantages)]
    mask_too = np.concatenate([mask, np.zeros(more, np.bool_)])
    value, slopes = computed(name, *longer, mask_too, np.concatenate([lengths, extra]))
    expected, gradient = computed(name, new, old, advantages, mask, lengths)
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(slopes[: len(new)], gradient, atol=1e-6)
    assert not slopes[len(new) :].any()
    assert computed(name, new, old, advantages, np.zeros_like(mask), lengths)[0] == 0.0


def test_losses_are_named_alike_where_they_are_configured_and_where_they_are_defined():
    assert list(plugin.LOSSES) == list(config.CLIPS) == NAMES


def test_every_loss_with_options_of_its_own_has_them_by_the_names_of_its_function():
    for name in config.TABLES:
        table = config.GrpoOptions.model_validate({"loss": name, name: {}})
        defaults = signature(LOSSES[name].surrogate).parameters
        assert table.loss_values == {
            each: one.default for each, one in defaults.items() if each not in ("rows", "clip")
        }


def test_dr_grpo_asks_for_its_length_and_the_others_refuse_it():
    with pytest.raises(ValidationError, match="set loss_length"):
        GrpoOptions(loss="dr_grpo")
    with pytest.raises(ValidationError, match="set loss_length"):
        GrpoOptions(average="constant")
    with pytest.raises(ValidationError, match="remove it"):
        GrpoOptions(loss="grpo", loss_length=10)
    assert GrpoOptions(loss="gspo", average="constant", loss_length=10).loss_length == 10


# -- a stranger's loss


@register()
def sound(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages, ratio.detach())


@register()
def whole_batch(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * (rows.advantages - rows.advantages.mean()), ratio.detach())


@register()
def wrong_sign(rows, clip):
    ratio = rows.ratio()
    return Surrogate(ratio * rows.advantages, ratio.detach())


@register()
def half_detached(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio.detach() * ratio * rows.advantages, ratio.detach())


@register()
def already_summed(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-(ratio * rows.advantages).sum(), ratio.detach())


@register()
def with_gradient(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages, ratio)


@register()
def writes(rows, clip):
    rows.advantages.mul_(2.0)
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages, ratio.detach())


@register()
def neighbour(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages - 0.1 * rows.logprobs.roll(1) * ratio, ratio.detach())


@register()
def not_finite(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages / 0.0, ratio.detach())


@register()
def unbounded(rows, clip):
    ratio = (rows.logprobs - rows.old).exp()
    return Surrogate(-ratio.clamp(max=1.2) * rows.advantages, ratio.detach().clamp(max=9.0))


@register()
def raises(rows, clip):
    raise ValueError("no such thing")


@register()
def always_pulls(rows, clip):
    ratio = rows.ratio()
    return Surrogate(-ratio * rows.advantages + 0.1 * rows.logprobs, ratio.detach())


@pytest.mark.parametrize(
    ("loss", "broken"),
    [
        (whole_batch, "split"), (wrong_sign, "reinforces"), (half_detached, "gradient"), (already_summed, "shapes"),
        (with_gradient, "shapes"), (writes, "inputs unchanged"), (neighbour, "order"), (not_finite, "finite"),
        (raises, "computes"), (unbounded, "far apart"), (always_pulls, "zero advantages"),
    ],
)  # fmt: skip
def test_each_fault_of_a_strangers_loss_is_found_by_its_name(loss, broken):
    assert broken in [finding.subject for finding in check_loss(loss) if finding.ok is False]


def test_a_decorated_function_keeps_what_it_was_declared_with():
    plain = register()(policy_gradient)
    assert (plain.name, plain.average, plain.clip, plain.holds_fixed) == (
        "policy_gradient",
        "token",
        (0.2, 0.2, None),
        False,
    )
    made = register(average="sum", clip=(0.1, 0.3), holds_fixed=True)(policy_gradient)
    assert (made.average, made.clip, made.holds_fixed) == ("sum", (0.1, 0.3, None), True)


def test_a_check_can_be_skipped_by_name():
    verdicts = {
        finding.subject: finding.ok for finding in check_loss(always_pulls, skip=["zero advantages", "reinforces"])
    }
    assert verdicts["zero advantages"] is None
    assert False not in verdicts.values()


def test_a_strangers_sound_loss_passes_and_may_be_named_by_its_file(tmp_path, monkeypatch):
    assert all(finding.ok for finding in check_loss(sound))
    (tmp_path / "mine.py").write_text(
        "from atropos_trainer_grpo.losses import Surrogate, register\n\n@register(average='sum')\ndef mine(rows, clip):\n"
        "    ratio = rows.ratio()\n    return Surrogate(-ratio * rows.advantages, ratio.detach())\n\n"
        "@register()\ndef wrong(rows, clip):\n    return Surrogate(rows.logprobs * rows.advantages, rows.old)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert all(finding.ok for finding in check("loss", "./mine.py:mine"))
    with pytest.raises(ContractBroken, match="reinforces"):
        loss_contract("./mine.py:wrong")()
