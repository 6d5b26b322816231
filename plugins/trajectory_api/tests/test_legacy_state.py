"""An environment that obeys /status-env, next to others."""

from __future__ import annotations

from typing import Any

from atropos_trajectory_api.service.old_registrations import RegisterEnv, Registration
from atropos_trajectory_api.service.old_state import OldEnvironment, OldState
from plugins.trajectory_api.tests.running import ENVIRONMENT, REGISTER

BATCH, GROUP = 16, 4
STEPS = 50


def registered(*names: str) -> tuple[OldState, list[OldEnvironment]]:
    state = OldState()
    state.register(Registration(**{**REGISTER, "batch_size": BATCH, "num_steps": STEPS}))
    state.start()
    return state, [state.add(RegisterEnv(**{**ENVIRONMENT, "desired_name": name}), 0.0) for name in names]


def stops(told: dict[str, Any], batches: int = 3) -> bool:
    """As BaseEnv decides, whose `max_batches_offpolicy` is 3 unless configured otherwise."""
    return bool(told["queue_size"] * GROUP >= batches * BATCH)


def test_an_environment_that_obeys_is_not_stopped_for_what_those_hold_who_do_not_ask() -> None:
    state, (obeying, _) = registered("obeying", "pushing")
    for nearly_full in (False, True):
        assert not stops(state.status(obeying, {"pushing_0": 400, "native": 400}, nearly_full=nearly_full))
        some = {"obeying_0": 12, "pushing_0": 400, "native": 400}
        assert not stops(state.status(obeying, some, nearly_full=nearly_full))
        assert stops(state.status(obeying, {**some, "obeying_0": 80}, nearly_full=nearly_full)), "its own are enough"


def test_who_holds_its_part_stops_at_three_batches_of_all_or_where_the_hub_is_nearly_full() -> None:
    state, (first, second) = registered("first", "second")
    for one in (first, second):
        assert stops(state.status(one, {"first_0": 24, "second_0": 24}, nearly_full=False))
        assert not stops(state.status(one, {"first_0": 20, "second_0": 20}, nearly_full=False))
        assert stops(state.status(one, {"first_0": 4, "second_0": 4}, nearly_full=True))


def test_up_to_a_batch_everyone_gets_what_waits() -> None:
    state, (first, second) = registered("first", "second")
    assert state.status(first, {"first_0": 16}, nearly_full=False)["queue_size"] == 4
    assert state.status(second, {"first_0": 16}, nearly_full=False)["queue_size"] == 4


def test_a_deep_queue_stops_an_environment_and_does_not_end_it() -> None:
    state, (only,) = registered("only")
    told = state.status(only, {"only_0": STEPS * BATCH}, nearly_full=False)
    assert stops(told)
    assert told["current_step"] + told["queue_size"] * GROUP // BATCH <= STEPS, "beyond, BaseEnv ends for good"
    assert told["self_queue_size"] == told["queue_size"]
