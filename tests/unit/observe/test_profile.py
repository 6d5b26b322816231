"""Where the time went: stages add up, calls overlap, nobody is idle while in use, and a resumed run goes on counting."""

from __future__ import annotations

import json

import pytest

from atropos_core.observe.profile import MOST_NAMES, Profile


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_stages_and_the_rest_add_up_to_the_wall_time():
    clock = Clock()
    profile = Profile(clock)
    for _ in range(3):
        with profile.span("waiting", items=4):
            clock.now += 2
        with profile.span("trainer") as span:
            clock.now += 1
            span.items = 8
        clock.now += 0.5
    seconds = profile.seconds()
    assert seconds == {"waiting": 6.0, "trainer": 3.0, "other": pytest.approx(1.5)}
    waiting, trainer, other = profile.rows()
    assert (waiting.name, waiting.calls, waiting.items_per_s) == ("waiting", 3, pytest.approx(2.0))
    assert (trainer.share, trainer.items_per_s) == (pytest.approx(3 / 10.5), pytest.approx(8.0))
    assert waiting.p95_s == pytest.approx(2.0, rel=0.03)
    assert other.name == "other"
    assert sum(seconds.values()) == pytest.approx(profile.wall_s)


def test_overlapping_calls_are_busy_once_and_whoever_is_not_called_is_idle():
    clock = Clock()
    profile = Profile(clock)
    first, second = profile.call("engine/sample"), profile.call("engine/sample", 2)
    first.__enter__()
    clock.now += 1
    second.__enter__()
    clock.now += 1
    first.__exit__(None, None, None)
    clock.now += 1
    second.__exit__(None, None, None)  # 3 s in which at least one was in flight, 4 s in all
    with profile.call("trainer/step"):
        clock.now += 1
    clock.now += 1
    assert profile.idle() == {"engine": pytest.approx(2 / 5), "trainer": pytest.approx(4 / 5)}
    [row] = [row for row in profile.rows() if row.name == "engine/sample"]
    assert (row.seconds, row.share) == (3.0, pytest.approx(3 / 5))
    step = profile.step()
    assert step["time/engine_idle_share"] == pytest.approx(2 / 5)
    with profile.call("engine/sample"):
        clock.now += 1
    assert profile.step()["time/engine_idle_share"] == pytest.approx(0.0), "of this step alone"


def test_a_pause_is_no_work():
    clock = Clock()
    profile = Profile(clock)
    with profile.call("engine/pause"):
        clock.now += 1
    assert profile.idle() == {"engine": 1.0}


def test_the_metrics_of_a_step_are_what_came_since_the_last():
    clock = Clock()
    profile = Profile(clock)
    with profile.span("transform.drop_flat"):
        clock.now += 2
    assert profile.step()["time/transform/drop_flat_s"] == pytest.approx(2.0)
    assert profile.step()["time/transform/drop_flat_s"] == 0.0


def test_calls_that_overlap_tell_of_a_step_the_seconds_in_which_one_was_in_flight():
    clock = Clock()
    profile = Profile(clock)
    with profile.call("engine/sample"), profile.call("engine/sample"):
        clock.now += 4
        assert profile.step()["time/engine/sample_s"] == pytest.approx(4.0)
        clock.now += 3
    clock.now += 2
    saved = json.loads(json.dumps(profile.state()))
    assert profile.step()["time/engine/sample_s"] == pytest.approx(3.0)
    assert profile.step()["time/engine/sample_s"] == 0.0
    resumed = Profile(clock)
    resumed.load(saved)
    assert resumed.step()["time/engine/sample_s"] == 0.0


def test_a_span_whose_work_fails_is_counted():
    profile = Profile()
    with pytest.raises(ValueError, match="broken"), profile.span("packing"):
        raise ValueError("broken")
    assert [row.calls for row in profile.rows() if row.name == "packing"] == [1]


def test_a_resumed_run_goes_on_counting():
    clock = Clock()
    before, whole = Profile(clock), Profile(clock)
    for profile in (before, whole):
        profile.add("trainer", 3.0, 6)
    clock.now += 3
    saved = json.loads(json.dumps(before.state()))
    after = Profile(clock)
    after.add("start-up", 1.0)  # before its state is loaded
    clock.now += 1
    after.load(saved)
    assert after.seconds() == {"start-up": 1.0, "trainer": 3.0, "other": pytest.approx(0.0)}
    assert after.wall_s == pytest.approx(4.0)
    [row] = [row for row in after.rows() if row.name == "trainer"]
    assert (row.calls, row.items_per_s) == (1, pytest.approx(2.0))


def test_names_from_outside_do_not_grow_without_end():
    profile = Profile()
    for number in range(2 * MOST_NAMES):
        with profile.call(f"api/{number}"):
            pass
    assert len(profile.rows()) <= MOST_NAMES + 2


def test_rollouts_of_an_older_checkpoint_count_on_under_their_new_name():
    before = Profile()
    before.add("environment.gsm8k/play", 3.0, 4, kind="call")
    after = Profile()
    after.load(before.state())
    after.add("environment.gsm8k/rollout", 1.0, kind="call")
    assert [(row.name, row.calls) for row in after.rows() if row.kind == "call"] == [("environment.gsm8k/rollout", 2)]
