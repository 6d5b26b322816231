"""Curricula: which draw comes when, also after a resume."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import TaskSource
from atropos_core.seeds import derive
from atropos_core.types import Draw


def curriculum(seed: int = 0, *, shuffled: bool = True, **sources: tuple[int, float]) -> OrderedCurriculum:
    made = OrderedCurriculum(seed, shuffled=shuffled)
    made.open({name: TaskSource(*source) for name, source in (sources or {"a": (5, 1.0)}).items()})
    return made


def resumed(state: Any, seed: int = 0, **options: Any) -> OrderedCurriculum:
    made = curriculum(seed, **options)
    made.load(json.loads(json.dumps(state)))
    return made


def test_in_order_means_the_order_of_the_data_again_and_again():
    draws = curriculum(shuffled=False).draw(12)
    assert [draw.index for draw in draws] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert [draw.id for draw in draws] == list(range(12))
    assert {(draw.environment, draw.split) for draw in draws} == {("a", "train")}


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_shuffled_means_every_task_once_an_epoch(seed, size):
    indices = [draw.index for draw in curriculum(seed, a=(size, 1.0)).draw(3 * size)]
    for epoch in range(3):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    def orders(seed: int) -> list[tuple[int, ...]]:
        indices = [draw.index for draw in curriculum(seed, a=(50, 1.0)).draw(100)]
        return [tuple(indices[:50]), tuple(indices[50:])]

    assert len({*orders(0), *orders(1), tuple(range(50))}) == 5


@pytest.mark.parametrize("shuffled", [True, False])
def test_draws_are_the_same_however_they_are_requested(shuffled):
    sources: Any = {"a": (3, 1.0), "b": (7, 2.0)}
    at_once = curriculum(4, shuffled=shuffled, **sources).draw(30)
    one = curriculum(4, shuffled=shuffled, **sources)
    in_parts = [*one.draw(1), *one.draw(0), *one.draw(20), *one.draw(9)]
    assert at_once == in_parts


def test_every_draw_has_a_seed_that_derives_from_the_runs_and_its_number():
    draws = curriculum(7).draw(100)
    assert [draw.seed for draw in draws] == [derive(7, "draw", number) for number in range(100)]
    assert len({draw.seed for draw in draws}) == 100


def test_environments_are_mixed_by_weight():
    draws = curriculum(a=(10, 3.0), b=(10, 1.0), never=(10, 0.0)).draw(4000)
    counts = Counter(draw.environment for draw in draws)
    assert set(counts) == {"a", "b"}
    assert abs(counts["a"] - 3000) < 5 * (4000 * 0.75 * 0.25) ** 0.5, "within five standard deviations"


def test_each_environment_keeps_an_epoch_of_its_own():
    draws = curriculum(a=(4, 1.0), b=(9, 1.0)).draw(200)
    for name, size in (("a", 4), ("b", 9)):
        indices = [draw.index for draw in draws if draw.environment == name]
        for start in range(0, len(indices) - size, size):
            assert sorted(indices[start : start + size]) == list(range(size))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_a_resumed_curriculum_hands_out_what_was_never_settled_first_and_then_goes_on(portions, data):
    sources: Any = {"a": (5, 1.0), "b": (3, 1.0)}
    first = curriculum(1, **sources)
    open_: list[Draw] = []
    for portion in portions:
        open_ += first.draw(portion)
        for draw in data.draw(st.lists(st.sampled_from(open_), unique=True)):
            first.settle(draw, "trained", None)
            open_.remove(draw)
    second = resumed(first.state(), 1, **sources)
    wanted = sorted(open_, key=lambda draw: draw.id)
    assert second.draw(len(open_)) == wanted
    assert second.draw(10) == curriculum(1, **sources).draw(sum(portions) + 10)[-10:]


def test_a_draw_handed_out_again_stays_open_until_it_is_settled():
    first = curriculum()
    draws = first.draw(3)
    second = resumed(first.state())
    assert second.draw(2) == draws[:2]
    second.settle(draws[0], "dropped", None)
    assert resumed(second.state()).draw(3) == [draws[1], draws[2], curriculum().draw(4)[3]]


def test_draws_of_an_environment_that_is_not_back_yet_are_handed_out_once_it_is():
    sources: Any = {"a": (5, 1.0), "b": (5, 1.0)}
    first = curriculum(**sources)
    draws = first.draw(8)
    assert {draw.environment for draw in draws} == {"a", "b"}
    second = resumed(first.state(), a=(5, 1.0))
    there, away = ([draw for draw in draws if draw.environment == name] for name in "ab")
    assert second.draw(len(there)) == there
    assert [draw.id for draw in second.draw(2)] == [8, 9], "those of the other wait"
    second.open({name: TaskSource(*source) for name, source in sources.items()})
    assert second.draw(len(away)) == away


def test_a_state_does_not_change_when_the_curriculum_goes_on():
    one = curriculum()
    one.draw(2)
    state = one.state()
    before = json.dumps(state)
    one.draw(5)
    assert json.dumps(state) == before


def test_a_draw_is_settled_once():
    one = curriculum()
    [draw] = one.draw(1)
    one.settle(draw, "flat", None)
    with pytest.raises(KeyError):
        one.settle(draw, "trained", None)


def test_an_environment_without_tasks_is_named():
    with pytest.raises(DataError, match="environment 'empty' has no training tasks: its tasks.'train'. is empty"):
        curriculum(a=(3, 1.0), empty=(0, 1.0))


def test_weights_that_are_all_nothing_are_refused():
    with pytest.raises(ConfigError, match="weight above 0"):
        curriculum(a=(3, 0.0), b=(3, 0.0))


def test_an_environment_that_goes_and_comes_back_goes_on_where_it_was():
    one = curriculum(shuffled=False, a=(5, 1.0), b=(9, 1.0))
    before = [draw.index for draw in one.draw(8) if draw.environment == "b"]
    one.open({"a": TaskSource(5, 1.0)})
    assert {draw.environment for draw in one.draw(8)} == {"a"}
    one.open({"a": TaskSource(5, 1.0), "b": TaskSource(9, 1.0)})
    after = [draw.index for draw in one.draw(20) if draw.environment == "b"]
    assert [*before, *after][:9] == list(range(9))


def test_an_environment_may_come_back_with_more_tasks():
    one = curriculum(a=(3, 1.0))
    one.draw(2)
    one.open({"a": TaskSource(9, 1.0)})
    assert len({draw.index for draw in one.draw(7)}) == 7


def test_draws_of_tasks_that_are_gone_wait_until_the_tasks_are_back():
    before = curriculum(shuffled=False, a=(5, 1.0))
    before.draw(5)
    fewer = resumed(before.state(), shuffled=False, a=(3, 1.0))
    assert [draw.index for draw in fewer.draw(4)] == [0, 1, 2, 2], "an epoch is of three tasks now"
    back = resumed(fewer.state(), shuffled=False, a=(5, 1.0))
    assert {draw.id for draw in back.draw(6)} == set(range(6))
