"""The five curricula: their contract, which draws they give, and that a resumed one continues as if it had not stopped."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Measured, Snapshotted, TaskSource
from atropos_core.types import Draw, ScoredGroup, Task
from atropos_curriculum import config
from atropos_curriculum.curriculum import AdaptiveCurriculum
from atropos_curriculum.outcome import evidence_of
from atropos_curriculum.strategies import strategy_of
from atropos_testing import curriculum_contract
from atropos_testing.samples import make_group

OPTIONS: dict[str, type[config.CurriculumOptions]] = {
    "easy_first": config.EasyFirstOptions,
    "competence": config.CompetenceOptions,
    "learning_progress": config.LearningProgressOptions,
    "prioritized": config.PrioritizedOptions,
    "window": config.WindowOptions,
}
NAMES = tuple(OPTIONS)
each = pytest.mark.parametrize("name", NAMES)

test_easy_first_contract = curriculum_contract("easy_first")
test_competence_contract = curriculum_contract("competence")
test_learning_progress_contract = curriculum_contract("learning_progress")
test_prioritized_contract = curriculum_contract("prioritized")
test_window_contract = curriculum_contract("window")

DATA = [Task(str(at), (), data={"hard": at}) for at in range(200)]
FIELD = {"prior": {"field": "hard"}}


def made(name: str, seed: int = 0, sources: dict[str, TaskSource] | None = None, **options: Any) -> AdaptiveCurriculum:
    chosen = OPTIONS[name].model_validate(options)
    one = AdaptiveCurriculum(seed, chosen, strategy_of(chosen))
    one.open(sources or {"a": TaskSource(200, 1.0, DATA)})
    return one


def scored(draw: Draw, correct: int, of: int = 8) -> ScoredGroup:
    return replace(make_group(draw.id, [1.0] * correct + [0.0] * (of - correct)), draw=draw)


def run(one: AdaptiveCurriculum, steps: int, rng: np.random.Generator) -> list[Draw]:
    """Steps of 8 draws of tasks that are harder the higher their number, settled in another order than drawn."""
    seen = []
    for _ in range(steps):
        drawn = one.draw(8)
        seen += drawn
        for at in rng.permutation(8):
            correct = int(rng.binomial(8, 1 - drawn[at].index / 200))
            one.settle(drawn[at], "trained" if 0 < correct < 8 else "flat", scored(drawn[at], correct))
    return seen


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@each
@pytest.mark.parametrize("options", [{}, FIELD], ids=["no prior", "prior"])
def test_draws_after_a_load_are_those_of_a_run_that_went_on(name, options):
    one = made(name, 3, **options)
    run(one, 30, np.random.default_rng(1))
    one.draw(5)  # outstanding
    other = made(name, 3, **options)
    other.load(through_json(one.state()))
    assert other.draw(5) == [draw for draw, _ in sorted(one._open.values(), key=lambda pair: pair[0].id)]
    assert through_json(other.state()) | {"step": {}} == through_json(one.state()) | {"step": {}}
    assert run(one, 20, np.random.default_rng(2)) == run(other, 20, np.random.default_rng(2))


@each
@pytest.mark.parametrize("options", [{}, FIELD], ids=["no prior", "prior"])
def test_what_was_marked_is_the_state_of_that_moment_whatever_happened_since(name, options):
    one = made(name, 5, **options)
    run(one, 10, np.random.default_rng(1))
    one.draw(3)
    one.take_snapshot()
    then = through_json(one.state())
    run(one, 10, np.random.default_rng(2))
    assert through_json(one.snapshot()) == then
    assert through_json(one.state()) != then
    assert through_json(one.snapshot()) == then, "asking twice changes nothing"
    resumed = made(name, 5, **options)
    resumed.load(through_json(one.snapshot()))
    assert through_json(resumed.state()) == then


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 2**31))
def test_between_two_settled_draws_draws_are_the_same_however_they_are_requested(name, portions, seed):
    sources = {"a": TaskSource(7, 1.0), "b": TaskSource(200, 2.0, DATA)}
    one, other = (made(name, seed, sources) for _ in range(2))
    in_parts = [draw for portion in portions for draw in one.draw(portion)]
    assert in_parts == other.draw(sum(portions))


@settings(max_examples=20)
@given(st.sampled_from(NAMES), st.data())
def test_draws_that_were_never_settled_come_first_and_once(name, data):
    one = made(name)
    drawn = one.draw(20)
    left = data.draw(st.lists(st.sampled_from(drawn), unique=True))
    for draw in drawn:
        if draw not in left:
            one.settle(draw, "stale", None)
    other = made(name)
    other.load(through_json(one.state()))
    again = other.draw(len(left) + 5)
    assert again[: len(left)] == sorted(left, key=lambda draw: draw.id)
    assert [draw.id for draw in again[len(left) :]] == list(range(20, 25))
    assert other.draw(5) == one.draw(10)[5:], "later numbers are as they would have been"


@each
def test_a_draw_is_settled_once(name):
    one = made(name)
    [draw] = one.draw(1)
    one.settle(draw, "failed", None)
    with pytest.raises(KeyError):
        one.settle(draw, "trained", None)


@each
def test_tasks_that_are_being_run_are_not_drawn_again_while_there_are_others(name):
    indices = [draw.index for draw in made(name, explore=1.0).draw(60)]
    assert len(set(indices)) == 60


@each
def test_environments_are_mixed_by_weight(name):
    sources = {"a": TaskSource(100, 3.0), "b": TaskSource(100, 1.0), "never": TaskSource(9, 0.0)}
    one = made(name, sources=sources)
    counts = Counter(draw.environment for _ in range(40) for draw in one.draw(100))
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] - 3000) < 5 * (4000 * 0.75 * 0.25) ** 0.5, "within five standard deviations"
    numbers_of = one.metrics()
    assert numbers_of["share/a"] == counts["a"] / 4000
    assert numbers_of["drawn"] == 4000


@each
def test_success_is_learned_where_it_is_and_the_rest_is_drawn_no_more_often(name):
    """After many visits, what is drawn is what the strategy says of the true success."""
    one = made(name, 1, **FIELD)
    run(one, 400, np.random.default_rng(0))
    drawn = np.array([_alone(one) for _ in range(800)])
    easy, middle, hard = ((drawn < 20).mean(), ((drawn > 60) & (drawn < 140)).mean(), (drawn > 190).mean())
    if name == "competence":  # after 3200 draws all that is unsolved comes
        assert easy < 0.08 and hard > 0.02
    elif name == "easy_first":
        assert 20 < np.median(drawn) < 100 and hard < 0.03  # some that were lucky count as solved for a while
    elif name != "learning_progress":  # here nothing ever changes
        assert middle > 0.4 and middle > 4 * max(easy, hard)


def _alone(one: AdaptiveCurriculum) -> int:
    """The task of one draw, which nothing is learned from."""
    [draw] = one.draw(1)
    one.settle(draw, "dropped", None)
    return draw.index


def test_a_window_lets_go_of_what_is_too_easy_or_too_hard_and_takes_it_back():
    one = made("window", sources={"a": TaskSource(30, 1.0)})
    correct = {index: 8 if index < 10 else 0 if index < 20 else 4 for index in range(30)}
    for _ in range(40):
        for draw in one.draw(8):
            one.settle(draw, "trained", scored(draw, correct[draw.index]))
    numbers_of = one.metrics()
    assert (numbers_of["too_easy"], numbers_of["too_hard"], numbers_of["tried"]) == (10 / 30, 10 / 30, 1.0)
    assert numbers_of["flat"] < 0.5
    drawn = [draw.index for _ in range(300) for draw in _settled(one, 8, correct)]
    assert 0.05 < np.mean(np.array(drawn) < 20) < 0.15, "explore: one in ten looks at the retired"
    correct |= dict.fromkeys(range(10, 20), 4)  # the policy has learned these
    for _ in range(300):
        _settled(one, 8, correct)
    assert one.metrics()["too_hard"] == 0


def _settled(one: AdaptiveCurriculum, n: int, correct: dict[int, int]) -> list[Draw]:
    drawn = one.draw(n)
    for draw in drawn:
        one.settle(draw, "trained", scored(draw, correct[draw.index]))
    return drawn


def test_tasks_never_tried_are_known_by_their_bin():
    """Easy and hard tasks by the field; a few outcomes of each bin, and the others of it are judged alike."""
    tasks = [Task(str(at), (), data={"hard": at // 5000}) for at in range(10_000)]
    one = made("prioritized", sources={"a": TaskSource(10_000, 1.0, tasks)}, prior={"field": "hard", "bins": 2})
    for _ in range(40):
        for draw in one.draw(8):
            one.settle(draw, "trained", scored(draw, 4 if draw.index >= 5000 else 8))
    share = np.mean([draw.index >= 5000 for _ in range(50) for draw in one.draw(8)])
    assert share > 0.8
    assert one.metrics()["tried"] < 0.04


def test_a_field_is_read_for_as_many_tasks_as_requested_and_further_with_each_draw():
    class Lazy(list[Task]):
        read = 0

        def __getitem__(self, index):
            Lazy.read += 1
            return Task(str(index), (), data={"hard": float(index)})

        def __len__(self):
            return 10_000_000

    prior = {"field": "hard", "read": 100, "read_ahead": 3}
    one = made("window", sources={"a": TaskSource(10_000_000, 1.0, Lazy())}, prior=prior)
    assert Lazy.read == 100
    for draw in one.draw(10):
        one.settle(draw, "trained", scored(draw, 4))
    assert Lazy.read == 130


def test_a_field_that_is_not_there_is_named_with_what_there_is():
    with pytest.raises(ConfigError, match=r"'level' is not a number in task '0' of environment 'a', which has hard"):
        made("window", prior={"field": "level"})


def test_a_field_of_tasks_that_are_elsewhere_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"not in this process(.|\n)*curriculum.prior.file"):
        made("window", sources={"a": TaskSource(5, 1.0)}, **FIELD)


def test_a_prior_file_gives_the_same_bins_as_the_field(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200))
    (tmp_path / "a.txt").write_text("\n".join(map(str, range(200))))
    by_field = made("easy_first", 2, **FIELD)
    wanted = run(by_field, 20, np.random.default_rng(0))
    for suffix in ("npy", "txt"):
        by_file = made("easy_first", 2, prior={"file": str(tmp_path / ("{environment}." + suffix))})
        assert run(by_file, 20, np.random.default_rng(0)) == wanted
        again = made("easy_first", 2, prior={"file": str(tmp_path / ("{environment}." + suffix))})
        again.load(through_json(by_file.state()))
        assert again.draw(20) == by_file.draw(20)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [([1.0] * 7, "shape .7,., and environment 'a' has 200"), ([0.0] * 199 + [float("nan")], "not finite")],
)
def test_a_prior_file_that_does_not_fit_is_refused(tmp_path, numbers, message):
    np.save(tmp_path / "a.npy", numbers)
    with pytest.raises(DataError, match=message):
        made("window", prior={"file": str(tmp_path / "a.npy")})


def test_difficulties_that_are_taken_for_success_rates_are_refused_with_what_to_say(tmp_path):
    np.save(tmp_path / "a.npy", [0.0] * 199 + [2.0])
    with pytest.raises(DataError) as found:
        made("window", prior={"file": str(tmp_path / "a.npy"), "meaning": "success"})
    assert found.value.remedy == 'With higher meaning harder, say meaning = "difficulty".'


def test_a_curriculum_takes_up_what_another_has_learned():
    one = made("window", 1)
    run(one, 60, np.random.default_rng(0))
    other = made("easy_first", 1)
    other.load(through_json(one.state()))
    fresh = other.metrics()
    assert fresh["tried"] == one.metrics()["tried"]
    assert np.mean([_alone(other) for _ in range(200)]) < 80, "easy ones: it knows which"


def test_an_environment_may_come_back_with_more_tasks_or_fewer_and_what_is_known_stays():
    one = made("window", sources={"a": TaskSource(20, 1.0)})
    for _ in range(20):
        for draw in one.draw(4):
            one.settle(draw, "flat", scored(draw, 0))
    before = one.metrics()["too_hard"]
    assert before > 0.8
    one.take_snapshot()
    for size in (5, 300_000, 20):
        one.open({"a": TaskSource(size, 1.0)})
        assert all(draw.index < size for draw in _settled(one, 30, dict.fromkeys(range(size), 0)))
        assert through_json(one.snapshot())["banks"]["a"]["size"] >= 20
    assert one.metrics()["too_hard"] >= before


def test_metrics_are_reported_and_a_mark_is_offered():
    one = made("competence")
    assert isinstance(one, Measured) and isinstance(one, Snapshotted)
    _settled(one, 8, dict.fromkeys(range(200), 4))
    numbers_of = one.metrics()
    assert numbers_of["settled_success"] == 0.5 and numbers_of["flat"] == 0 and numbers_of["competence"] > 0.1
    assert one.metrics()["drawn"] == 0
    json.dumps(numbers_of)


def test_success_is_what_the_environment_calls_correct_or_else_the_scaled_reward():
    options = config.WindowOptions(reward_range=(-1.0, 3.0))
    group = make_group(0, [0.0, 1.0, 1.0, 7.0])
    found = evidence_of(group, options)
    assert found is not None and (found.success, found.rollouts, found.clipped) == (0.75, 4, False)
    unsaid = replace(group, episodes=tuple(replace(episode, correct=None) for episode in group.episodes))
    found = evidence_of(unsaid, options)
    assert found is not None and found.success == pytest.approx((0.25 + 0.5 + 0.5 + 1) / 4) and found.clipped
    assert evidence_of(unsaid, config.WindowOptions(success="correct")) is None
    assert evidence_of(make_group(0, []), options) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": {}}, "give one of the two"),
        ({"prior": {"field": "x", "file": "y"}}, "give one of the two"),
        ({"low": 0.9}, "low = 0.9 is not below high = 0.8"),
        ({"reward_range": [1, 0]}, "must rise"),
        ({"lo": 0.1}, "Extra inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        config.WindowOptions.model_validate(options)


@each
def test_draws_of_tasks_that_are_gone_wait_until_the_tasks_are_back(name):
    before = made(name, sources={"a": TaskSource(50, 1.0)})
    drawn = before.draw(30)
    fewer = made(name, sources={"a": TaskSource(5, 1.0)})
    fewer.load(before.state())
    assert all(draw.index < 5 for draw in fewer.draw(30))
    back = made(name, sources={"a": TaskSource(50, 1.0)})
    back.load(fewer.state())
    assert {draw.id for draw in back.draw(60)} >= {draw.id for draw in drawn}
