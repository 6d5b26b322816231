"""What the transforms announce of themselves, against the advantages that they give."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from atropos_core.types import Episode
from atropos_credit.plugin import atropos_transforms
from atropos_testing.samples import make_group
from plugins.credit.tests.test_transforms import rollout

PROVIDERS = {one.name: one for one in atropos_transforms()}
# Episodes of one to three turns in two states, so that a discount meets an offset at different distances from the end.
EPISODES = ((2.0, "pAtBtC", {2: 0.5, 4: -1.0}), (1.0, "pAtB", {2: 1.0}), (-1.5, "pA", {}), (3.0, "pBtA", {4: 0.25}))


def group_with(offset=0.0, factor=1.0):
    """The group, with this factor on all rewards and then this offset on the totals, as `zscore` changes them."""
    episodes = []
    for total, layout, ends in EPISODES:
        made = rollout(layout, {end: factor * value for end, value in ends.items()})
        episodes.append(Episode((made,), factor * total + offset, correct=total > 1))
    return replace(make_group(0, [one.score for one in episodes]), episodes=tuple(episodes))


def advantages_of(name, options, **change):
    provider = PROVIDERS[name]
    [made] = asyncio.run(provider.build(provider.options(**options), None)([group_with(**change)]))
    columns = [of.advantages for one in made.episodes for of in one.rollouts if of.advantages is not None]
    return np.concatenate([made.advantages, *columns])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("turn_returns", {}),
        ("turn_returns", {"baseline": "state"}),
        ("turn_returns", {"baseline": "group"}),
        ("turn_returns", {"baseline": "group", "divide_by_std": True}),
        ("turn_returns", {"baseline": "none"}),
        ("turn_returns", {"discount": 0.9}),
        ("turn_returns", {"baseline": "group", "divide_by_std": True, "discount": 0.9}),
        ("turn_gae", {}),
        ("turn_gae", {"gae_lambda": 0.5}),
        ("turn_gae", {"discount": 0.9}),
        ("gigpo", {}),
        ("gigpo", {"discount": 1.0}),
        ("gigpo", {"discount": 1.0, "divide_by_std": True}),
        ("gigpo", {"divide_by_std": True}),
        ("maxrl", {}),
        ("maxrl", {"correct_above": 1.5}),
    ],
)
def test_an_offset_and_a_factor_are_undone_exactly_where_it_is_announced(name, options):
    undoes = PROVIDERS[name].announces(PROVIDERS[name].options(**options))["advantages"]["undoes"]
    plain = advantages_of(name, options)
    for change, given in (("offset", {"offset": -4.0}), ("factor", {"factor": 0.25})):
        same = np.allclose(advantages_of(name, options, **given), plain, rtol=1e-5, atol=1e-6)
        assert same == (change in undoes), change


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_group_with_equal_totals_has_advantages_exactly_where_it_is_announced(name):
    placed = [(0.0, {2: 1.0, 4: -1.0}), (0.0, {2: 0.0})]
    episodes = tuple(Episode((rollout("pAtA", ends),), total, correct=True) for total, ends in placed)
    group = replace(make_group(0, [0.0, 0.0]), episodes=episodes)
    provider = PROVIDERS[name]
    [made] = asyncio.run(provider.build(provider.options(), None)([group]))
    columns = [one.rollouts[0].advantages for one in made.episodes]
    has_some = any(column is not None and column.any() for column in columns) or made.advantages.any()
    assert has_some == provider.announces(provider.options())["advantages"]["by_turn"]


@pytest.mark.parametrize("baseline", ["others", "state", "group", "none"])
@pytest.mark.parametrize("size", [1e9, -1e9])
def test_the_largest_rewards_and_weights_give_finite_advantages(baseline, size):
    turns, most = 2000, 1e9
    layout = "p" + "At" * turns
    ends = {2 * at + 2: size * (1 if at % 3 else -1) for at in range(turns)}
    episodes = (
        Episode((rollout(layout, ends),), size),
        Episode((rollout(layout),), -size),
        Episode((rollout("pA"),), 0.0),
    )
    group = replace(make_group(0, [one.score for one in episodes]), episodes=episodes)
    cases = [
        ("turn_returns", {"baseline": baseline, "outcome_weight": most, "turn_weight": most}),
        ("turn_returns", {"baseline": "group", "divide_by_std": True, "discount": 1e-9}),
        ("turn_gae", {"outcome_weight": most, "turn_weight": most, "gae_lambda": 0.5}),
        ("gigpo", {"step_weight": most, "divide_by_std": True}),
        ("gigpo", {"step_weight": most, "discount": 1.0}),
    ]
    for name, options in cases:
        provider = PROVIDERS[name]
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            [made] = asyncio.run(provider.build(provider.options(**options), None)([group]))
        assert all(np.isfinite(one.rollouts[0].advantages).all() for one in made.episodes)
        assert np.isfinite(made.advantages).all() and made.advantages.any()


def advantages_by_turn(options, *episodes):
    provider = PROVIDERS["turn_returns"]
    made = tuple(Episode((rollout("pAtB", None if ends is None else ends),), total) for total, ends in episodes)
    group = replace(make_group(0, [total for total, _ in episodes]), episodes=made)
    [given] = asyncio.run(provider.build(provider.options(**options), None)([group]))
    return [one.rollouts[0].advantages[[1, 3]].tolist() for one in given.episodes]


def test_rounding_is_measured_in_the_unit_of_the_weighted_rewards():
    parts = ((1.0, {2: 1.0}), (0.0, {2: 0.0}))
    small = advantages_by_turn({"turn_weight": 1e-7, "outcome_weight": 0.0}, *parts)
    assert small == [[pytest.approx(1e-7), 0], [pytest.approx(-1e-7), 0]]
    rounded = ((0.3, None), (0.3 + 1e-7, None))
    assert advantages_by_turn({"outcome_weight": 1e3}, *rounded) == [[0, 0]] * 2
    # Divided advantages are about 1, however large the rewards are.
    assert advantages_by_turn({"baseline": "group", "divide_by_std": True}, *((2e7, {2: 1e7}), (1e7, {2: 0.0}))) == [
        [pytest.approx(np.sqrt(0.5)), 0],
        [pytest.approx(-np.sqrt(0.5)), 0],
    ]
