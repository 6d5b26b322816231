"""The transform `zscore` against a float64 oracle, and the settings in which it cannot matter."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.transforms import GroupAdvantage
from atropos_core.errors import ConfigError
from atropos_core.turn_rewards import outcome_rewards, turn_rewards
from atropos_normalization.config import ZScoreOptions
from atropos_normalization.zscore import ZScore, idle_reason
from atropos_testing import transform_contract
from atropos_testing.samples import make_group, make_groups

test_contract = transform_contract("zscore")
test_contract_from_the_first_sample = transform_contract("zscore", options={"warm_up": 2, "clip": 1.0})
test_contract_decayed = transform_contract("zscore", options={"warm_up": 2, "half_life": 10.0, "scope": "global"})


def of(number, rewards, environment="sample"):
    group = make_group(number, rewards)
    return replace(group, draw=replace(group.draw, environment=environment))


def oracle(steps, *, scope, center, scale, half_life, warm_up, clip):
    """Every step's rewards, from all samples of the past each time. steps: [[(environment, rewards), ...], ...]"""
    past: dict[str, list[float]] = {}
    out = []
    for step in steps:
        for environment, rewards in step:
            past.setdefault(environment if scope == "environment" else "", []).extend(rewards)
        made = []
        for environment, rewards in step:
            x = np.array(past[environment if scope == "environment" else ""], np.float64)
            r = np.array(rewards, np.float64)
            if len(x) < warm_up:
                made.append(r)
                continue
            w = 0.5 ** (np.arange(len(x))[::-1] / half_life) if half_life else np.ones(len(x))
            mean = (w * x).sum() / w.sum()
            std = np.sqrt((w * (x - mean) ** 2).sum() / (w.sum() - (w**2).sum() / w.sum()))
            d = np.clip(r - mean, -clip * std, clip * std) if clip else r - mean
            made.append((d if center else d + mean) / (std if scale else 1))
        out.append(made)
    return out


REWARDS = st.lists(st.integers(-4, 4), min_size=2, max_size=4).filter(lambda some: len(set(some)) > 1)
STEPS = st.lists(st.lists(st.tuples(st.sampled_from("ab"), REWARDS), min_size=1, max_size=3), min_size=1, max_size=4)


@given(
    STEPS,
    st.sampled_from(["environment", "global"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 3.0, 40.0]),
    st.sampled_from([2, 8]),
    st.sampled_from([0.5, 1.5]),
)
def test_every_option_gives_what_the_whole_past_gives(steps, scope, center, scale, half_life, warm_up, clip):
    options = {
        "scope": scope, "center": center, "scale": scale, "half_life": half_life, "warm_up": warm_up, "clip": clip
    }  # fmt: skip
    transform = ZScore(ZScoreOptions(**options))
    for at, (step, expected) in enumerate(zip(steps, oracle(steps, **options), strict=True)):
        groups = [of(10 * at + place, rewards, name) for place, (name, rewards) in enumerate(step)]
        coroutine = transform(groups)
        with pytest.raises(StopIteration) as ended:  # it waits for nothing
            coroutine.send(None)
        for made, wanted in zip(ended.value.value, expected, strict=True):
            np.testing.assert_allclose(made.rewards, wanted, rtol=1e-6, atol=1e-6)


async def test_rewards_are_those_of_the_group_until_the_warm_up_is_over():
    transform = ZScore(ZScoreOptions(warm_up=5, clip=None))
    [first] = await transform([of(0, [1, 3])])
    assert first.rewards.tolist() == [1, 3]
    measured = transform.metrics()
    assert (measured["unchanged"], measured["sample/count"]) == (1, 2)
    [second] = await transform([of(1, [1, 3, 5])])
    mean, std = np.mean([1, 3, 1, 3, 5]), np.std([1, 3, 1, 3, 5], ddof=1)
    np.testing.assert_allclose(second.rewards, (np.array([1, 3, 5]) - mean) / std, rtol=1e-6)
    assert second.parts["raw_reward"].tolist() == [1, 3, 5]
    assert transform.metrics()["unchanged"] == 0


async def test_environments_are_apart_or_together_as_configured():
    step = [of(0, [0, 1], "small"), of(1, [0, 1000], "large")]
    apart = await ZScore(ZScoreOptions(warm_up=2))(step)
    np.testing.assert_allclose(apart[0].rewards, apart[1].rewards, rtol=1e-5)
    together = await ZScore(ZScoreOptions(warm_up=2, scope="global"))(step)
    assert np.ptp(together[1].rewards) == pytest.approx(1000 * np.ptp(together[0].rewards), rel=1e-4)


async def test_the_order_of_a_step_s_groups_does_not_matter():
    step = make_groups()
    there = await ZScore(ZScoreOptions(warm_up=2))(step)
    back = await ZScore(ZScoreOptions(warm_up=2))(step[::-1])
    for one, other in zip(there, back[::-1], strict=True):
        np.testing.assert_allclose(one.rewards, other.rewards, rtol=1e-5, atol=1e-6)


async def test_rewards_without_variance_end_at_zero_and_noise_is_not_amplified():
    transform = ZScore(ZScoreOptions(warm_up=2))
    for value in (0.1, 1e6):
        [alike] = await transform([of(0, [value] * 8, f"of {value}")])
        assert alike.rewards.tolist() == [0] * 8
    noisy = [1.0, 1.0, 1.0, 1.0000001]
    [made] = await ZScore(ZScoreOptions(warm_up=2))([of(0, noisy)])
    assert np.abs(made.rewards).max() < 1e-6
    [made] = await GroupAdvantage(GroupAdvantageOptions())([made])
    assert made.advantages.tolist() == [0] * 4


async def test_a_flat_group_stays_flat_where_others_give_the_variance():
    transform = ZScore(ZScoreOptions(warm_up=2, clip=None))
    noisy, spread = of(0, [1.0, 1.0, 1.0, 1.0000001]), of(1, [0.9999998, 1.0000003, 1.0, 1.0000001])
    made = await GroupAdvantage(GroupAdvantageOptions())(await transform([noisy, of(2, [0, 5]), spread]))
    assert made[0].advantages.tolist() == [0] * 4
    assert made[2].advantages.tolist() == [0] * 4


async def test_clipping_is_in_sigmas_of_the_running_deviation_and_counted():
    transform = ZScore(ZScoreOptions(warm_up=2, clip=2.0))
    rewards = [0.0] * 50 + [1.0] * 49 + [100.0]
    [made] = await transform([of(0, rewards)])
    assert made.rewards.max() == 2
    assert (np.abs(made.rewards) < 2).sum() == 99
    assert transform.metrics()["clipped"] == pytest.approx(0.01)
    assert transform.metrics()["clipped"] == 0, "only of the step that has ended"


async def test_a_decayed_mean_follows_a_drift_that_the_plain_one_does_not():
    plain, decayed = (ZScore(ZScoreOptions(warm_up=2, half_life=half_life)) for half_life in (None, 16.0))
    for transform in (plain, decayed):
        for number in range(50):
            await transform([of(number, [0, 1])])
        for number in range(50):
            await transform([of(number, [10, 11])])
    assert plain.metrics()["sample/mean"] == pytest.approx(5.5)
    assert decayed.metrics()["sample/mean"] == pytest.approx(10.5, abs=0.15)
    assert decayed.metrics()["sample/std"] < 1.5


async def test_a_transform_that_goes_on_from_its_state_gives_the_same_bits():
    options = ZScoreOptions(warm_up=20, half_life=30.0)
    whole, first, resumed = ZScore(options), ZScore(options), ZScore(options)
    for step in range(3):
        await whole(make_groups(10 * step))
        await first(make_groups(10 * step))
    resumed.load(json.loads(json.dumps(first.state())))
    for step in range(3, 6):
        one, other = await whole(make_groups(10 * step)), await resumed(make_groups(10 * step))
        assert [group.rewards.tobytes() for group in one] == [group.rewards.tobytes() for group in other]
    whole.metrics(), resumed.metrics()
    assert whole.metrics() == resumed.metrics()


async def test_another_scope_than_that_of_the_state_is_refused():
    state = ZScore(ZScoreOptions()).state()
    with pytest.raises(ConfigError, match='scope is "global", and the statistics were gathered with scope = "env'):
        ZScore(ZScoreOptions(scope="global")).load(state)


async def test_groups_that_have_their_advantages_are_refused():
    made = await GroupAdvantage(GroupAdvantageOptions())([of(0, [0, 1])])
    with pytest.raises(ConfigError, match=r"before group_advantage"):
        await ZScore(ZScoreOptions())(made)


def test_options_that_do_nothing_are_refused():
    with pytest.raises(ValidationError, match="leave every reward as it is"):
        ZScoreOptions(center=False, scale=False, clip=None)


@pytest.mark.parametrize(
    ("after", "options", "matters"),
    [
        ({}, {}, False),  # GRPO divides
        ({"divide_by_std": False}, {}, True),
        ({"divide_by_std": False}, {"scale": False}, False),  # only an offset
        ({"baseline": "others"}, {}, True),
        ({"baseline": "others"}, {"scale": False}, False),
        ({"baseline": "none"}, {"scale": False}, True),
    ],
)
async def test_the_warning_comes_exactly_where_the_advantages_are_the_same(after, options, matters):
    """Check the claim on the advantages themselves, not only on the options."""
    zscore = ZScoreOptions(**{"warm_up": 2, "clip": None, **options})
    advantage = GroupAdvantageOptions(**after)
    assert bool(idle_reason(zscore, {"advantages": advantage.announced()})) is not matters
    groups = [of(0, [0, 3, 10]), of(1, [-7, 2, 5], "other")]
    plain = await GroupAdvantage(advantage)(groups)
    scored = await GroupAdvantage(advantage)(await ZScore(zscore)(groups))
    same = all(
        np.allclose(one.advantages, other.advantages, rtol=1e-5) for one, other in zip(plain, scored, strict=True)
    )
    assert same is not matters


@pytest.mark.parametrize(
    ("undoes", "options", "says"),
    [
        ({"offset": "discount below 1"}, {}, ""),  # the factor stays
        ({"factor": "divide_by_std = false"}, {}, ""),  # the offset stays
        ({}, {}, ""),
        ({"factor": "divide_by_std = false"}, {"center": False}, "any common factor of a group's rewards. It matters with divide_by_std"),
        ({"offset": "discount below 1"}, {"scale": False}, "any common offset of a group's rewards. It matters with scale = true in"),
        ({"offset": "x", "factor": "correct_above set"}, {}, "gigpo undoes any common offset and factor"),
        ({"offset": "x", "factor": "y"}, {"scale": False}, "It matters with x in [transform.gigpo]."),
        ({"offset": "x", "factor": "y"}, {"center": False, "scale": False}, ""),  # it is there to clip
    ],
)  # fmt: skip
def test_the_warning_names_the_transform_and_an_option_that_it_has(undoes, options, says):
    announced = {"advantages": {"by": "gigpo", "baseline": "group", "undoes": undoes}}
    why = idle_reason(ZScoreOptions(**options), announced)
    assert says in why and bool(why) == bool(says)


async def test_turn_rewards_far_larger_than_the_deviation_of_their_totals_are_divided_too():
    plain = make_group(0, [1.0, 1.01])
    turns = turn_rewards([len(plain.episodes[0].rollouts[0].tokens)], [1e9])
    first = replace(plain.episodes[0], rollouts=(replace(plain.episodes[0].rollouts[0], turns=turns),))
    [made] = await ZScore(ZScoreOptions(warm_up=2))([replace(plain, episodes=(first, plain.episodes[1]))])
    assert made.episodes[0].rollouts[0].turns.values[0] == pytest.approx(1e9 / np.std([1.0, 1.01], ddof=1), rel=1e-3)


def test_where_nobody_says_how_advantages_are_made_nothing_is_printed():
    assert idle_reason(ZScoreOptions(), {}) == ""


async def test_turn_rewards_are_divided_as_their_reward_is_and_the_rest_is_of_the_outcome():
    plain = make_group(0, [1.0, 2.0, 4.0, 9.0])
    turned = [
        replace(
            one,
            rollouts=(replace(one.rollouts[0], turns=turn_rewards([len(one.rollouts[0].tokens)], [one.score / 2])),),
        )
        for one in plain.episodes
    ]
    group = replace(plain, episodes=tuple(turned))
    [made] = await ZScore(ZScoreOptions(warm_up=2, clip=None))([group])
    [without] = await ZScore(ZScoreOptions(warm_up=2, clip=None))([plain])
    assert made.rewards.tobytes() == without.rewards.tobytes()
    assert all(one is other for one, other in zip(without.episodes, plain.episodes, strict=True))
    std = np.std([1.0, 2.0, 4.0, 9.0], ddof=1)
    values = [one.rollouts[0].turns.values[0] for one in made.episodes]
    assert values == pytest.approx([0.5 / std, 1 / std, 2 / std, 4.5 / std])
    assert outcome_rewards(made) == pytest.approx(made.rewards - values)
    [unscaled] = await ZScore(ZScoreOptions(warm_up=2, scale=False))([group])
    assert unscaled.episodes is group.episodes
