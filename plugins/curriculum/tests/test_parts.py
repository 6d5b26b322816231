"""The arithmetic of the curricula against plain numpy: the tree, bins, estimates and chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_curriculum import config
from atropos_curriculum.bank import Bank
from atropos_curriculum.base64_columns import packed, unpacked
from atropos_curriculum.chance import uniforms
from atropos_curriculum.priors import bins_of, inner_edges, spread, success_of_bins
from atropos_curriculum.strategies import View, strategy_of
from atropos_curriculum.tree import CellTree

VALUES = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 1.0, 1.5, 7.0]) | st.floats(-100, 100), min_size=1, max_size=200)


@settings(max_examples=40)
@given(st.integers(1, 70_000), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_a_tree_that_moved_is_the_tree_of_where_tasks_are_and_finds_every_one(size, count, seed):
    rng = np.random.default_rng(seed)
    cells = rng.integers(0, count, size).astype(np.uint8)
    tree = CellTree(cells, count)
    for index in rng.integers(0, size, 200).tolist():
        cells[index] = rng.integers(0, count)
        tree.move(index, int(cells[index]))
    assert (tree.cells == cells).all()
    assert (tree.counts == np.bincount(cells, minlength=count)).all()
    indices = rng.integers(0, size, 50)
    wanted = np.array([np.flatnonzero(cells == cells[index]).tolist().index(index) for index in indices])
    assert (tree.find(cells[indices].astype(np.int64), wanted) == indices).all()


@given(VALUES, st.integers(1, 15))
def test_bins_are_those_of_numpy_quantile_and_equal_values_share_one(values, bins):
    numbers = np.array(values)
    found = bins_of(numbers, inner_edges(numbers, bins))
    quantiles = {float(np.quantile(numbers, part / bins)) for part in range(1, bins)}
    assert found.tolist() == [sum(edge < value for edge in quantiles) for value in values]
    assert found.max() < bins


@pytest.mark.parametrize(("count", "bins"), [(100, 5), (1000, 8), (15, 15), (7, 1)])
def test_different_values_fill_bins_evenly(count, bins):
    values = np.random.default_rng(0).permutation(count).astype(float)
    sizes = np.bincount(bins_of(values, inner_edges(values, bins)), minlength=bins)
    assert sizes.max() - sizes.min() <= 1


def test_success_of_bins_is_the_mean_rate_or_falls_from_easy_to_hard():
    rates = np.array([0.0, 0.1, 0.5, 0.5, 0.9, 1.0])
    edges = inner_edges(rates, 3)
    means = success_of_bins(rates, edges, "success")
    bins = bins_of(rates, edges)
    assert means == pytest.approx([rates[bins == at].mean() for at in range(len(means))])
    assert success_of_bins(np.arange(8.0), inner_edges(np.arange(8.0), 4), "difficulty").tolist() == [
        0.875, 0.625, 0.375, 0.125,
    ]  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 500))
def test_tasks_are_read_spread_out_and_each_once(size, part):
    order = np.concatenate([spread(size, at, part) for at in range(0, size, part)])
    assert sorted(order.tolist()) == list(range(size))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=60))
def test_estimates_are_the_discounted_beta_bernoulli_mean(visits):
    """Against the sums in float64; all tasks are in one bin, whose own mean is of first visits."""
    options = config.PrioritizedOptions()
    bank = Bank(5, strategy_of(options), memory=0.7, prior_weight=1.0, slow=0.2, by_bin=False)
    good, bad, bin_good, bin_all, tried = np.zeros(5), np.zeros(5), 0.0, 0.0, set()
    for index, correct in visits:
        bank.learn(index, correct / 8, 8)
        good[index], bad[index] = 0.7 * good[index] + correct, 0.7 * bad[index] + 8 - correct
        if index not in tried:
            tried.add(index)
            bin_good, bin_all = 0.95 * bin_good + correct, 0.95 * bin_all + 8
    known = (8 * 0.5 + bin_good) / (8 + bin_all)
    wanted = (known + good) / (1 + good + bad)
    assert bank.success(np.arange(5)) == pytest.approx(wanted, abs=1e-6)
    assert bank.tried == len(tried)


def test_chance_is_even_and_each_place_has_its_own():
    values = uniforms(12345, np.arange(100_000), 1)
    assert ((values >= 0) & (values < 1)).all() and len(np.unique(values)) == 100_000
    counts = np.histogram(values, 20, (0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 45.0  # chi-squared of 19: above this once in a thousand
    other = uniforms(12345, np.arange(100_000), 2)
    assert abs(np.corrcoef(values, other)[0, 1]) < 0.015


@given(st.lists(st.integers(0, 2**40), max_size=50))
def test_columns_come_back_from_json(values):
    column = np.array(values, np.int64)
    assert unpacked(packed(column), np.int64).tolist() == values


def view(success: list[float], counts: list[int], *, settled: int = 0, tried: bool = True) -> View:
    return View(np.array(counts), np.array(success), np.zeros(len(counts)), np.full(len(counts), tried), settled)


def test_competence_lets_in_the_easiest_share_by_the_square_root_schedule():
    strategy = strategy_of(config.CompetenceOptions(draws=100, start=0.1, explore=0.0, solved=1.0))
    seen = view([0.2, 0.8, 0.5], [100, 100, 100])
    for settled in (0, 25, 60, 100, 1000):
        competence = min(1.0, (settled * (1 - 0.01) / 100 + 0.01) ** 0.5)
        inside = np.clip(competence * 300 - np.array([200, 0, 100]), 0, 100)
        shares = strategy.shares(view([0.2, 0.8, 0.5], [100, 100, 100], settled=settled))
        assert shares == pytest.approx(inside / inside.sum())
    assert strategy.metrics(seen) == {"competence": pytest.approx(0.1)}


def test_priorities_are_powers_of_learnability():
    strategy = strategy_of(config.PrioritizedOptions(power=2.0, floor=0.05, explore=0.2))
    success, counts = np.array([0.0, 0.1, 0.5, 1.0]), np.array([5, 10, 20, 1])
    weights = np.maximum(4 * success * (1 - success), 0.05) ** 2 * counts
    wanted = 0.8 * weights / weights.sum() + 0.2 * counts / counts.sum()
    assert strategy.shares(view(success.tolist(), counts.tolist())) == pytest.approx(wanted)


@pytest.mark.parametrize(("success", "kept"), [(0.25, False), (0.26, True), (0.74, True), (0.75, False), (0.5, True)])
def test_the_window_is_open_at_both_ends(success, kept):
    strategy = strategy_of(config.WindowOptions(low=0.25, high=0.75, explore=0.0))
    bank = Bank(2, strategy, memory=0.7, prior_weight=1e-300, slow=0.2, by_bin=False)
    bank.learn(0, success, 8)
    tried, untried = (strategy.shares(bank.view(1))[bank.view(1).tried == of].sum() for of in (True, False))
    assert (tried, untried) == ((0.5, 0.5) if kept else (0.0, 1.0))


def test_where_nothing_is_wanted_everything_is():
    for options in (config.EasyFirstOptions(), config.CompetenceOptions(), config.WindowOptions()):
        shares = strategy_of(options).shares(view([1.0, 0.99, 0.5], [30, 10, 0]))
        assert shares == pytest.approx([0.75, 0.25, 0.0])
