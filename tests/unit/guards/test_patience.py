"""How long a process has been silent, by the calls that it owes, and what is too long."""

from __future__ import annotations

import pytest

from atropos_core.guards.patience import Owed, Patience


def test_silence_counts_from_the_first_call_that_is_owed_and_ends_with_anything_that_comes():
    owed = Owed()
    assert owed.silent_s(5.0) == 0.0
    owed.begin(1, "sample", 10.0)
    owed.begin(2, "sample", 12.0)
    assert (owed.silent_s(15.0), owed.last) == (5.0, "sample")
    owed.end_silence(20.0)
    assert owed.silent_s(21.0) == 1.0, "both are still owed"
    owed.answered(1, 22.0)
    owed.answered(2, 22.0)
    owed.end_silence(22.0)
    assert owed.silent_s(100.0) == 0.0


@pytest.mark.parametrize(("late", "silent_s"), [(True, 40.0), (False, 10.0)])
def test_calls_given_up_at_their_deadlines_add_up_to_silence_and_those_that_nobody_wants_do_not(
    late: bool, silent_s: float
):
    owed = Owed()
    for number in range(4):
        owed.begin(number, "sample", 10.0 * number)
        assert owed.silent_s(10.0 * number) == (10.0 * number if late else 0.0)
        if number < 3:
            owed.given_up(number, 10.0 * (number + 1), late=late)
    assert owed.silent_s(40.0) == silent_s


def test_calls_that_wait_for_whoever_called_are_no_silence():
    owed = Owed()
    owed.begin(1, "sample", 0.0)
    owed.excuse({"sample"}, 50.0)
    assert owed.silent_s(50.0) == 0.0
    owed.begin(2, "resume", 60.0)
    owed.excuse({"sample"}, 65.0)
    assert owed.last == "resume", "that one is due"


def test_the_bound_is_the_larger_of_the_two_and_not_known_before_a_first_answer():
    patience = Patience(say_s=20.0, least_s=120.0, times=10.0)
    owed = Owed()
    owed.begin(1, "step", 0.0)
    assert owed.bound_s(patience) is None
    owed.answered(1, 3.0)
    owed.begin(2, "step", 10.0)
    assert owed.bound_s(patience) == 120.0, "ten times three seconds are too few"
    owed.answered(2, 60.0)
    owed.begin(3, "step", 70.0)
    assert owed.bound_s(patience) == 500.0, "fifty seconds are usual"
    owed.begin(4, "sample", 71.0)
    assert owed.bound_s(patience) is None, "nothing is known of a sample"
