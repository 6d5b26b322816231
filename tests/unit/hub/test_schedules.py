"""Runs in virtual time with random delays, failures and crashes; `make soak` runs ten thousand of either."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit import hub_schedules, virtual_time
from tests.unit.schedules import run_schedule

AT_ONCE = 50


@pytest.mark.parametrize("first", range(0, 150, AT_ONCE))
def test_no_token_is_too_old_no_group_is_lost_or_trained_twice_and_nothing_stands_still(first):
    happened = sum((run_schedule(seed) for seed in range(first, first + AT_ONCE)), start=run_schedule(first))
    for what in ("ProcessDied", "Interrupted", "CancelledError", "stale", "failed", "compared"):
        assert happened[what], f"or this shows nothing of {what}"
    assert happened["gave_up"] <= 1


@pytest.mark.parametrize("first", range(0, 100, 100))
def test_a_hub_whose_processes_die_loses_nothing_acknowledged_and_gives_nothing_twice(first):
    happened = sum(
        (hub_schedules.run_schedule(seed) for seed in range(first, first + 100)),
        start=hub_schedules.run_schedule(first),
    )
    for what in ("hub died", "trainer died", "worker died", "HubClosed", "LeaseLost", "answer lost", "stale"):
        assert happened[what], f"or this shows nothing of {what}"


def test_waiting_in_virtual_time_takes_none_and_keeps_its_order():
    async def main() -> list[float]:
        woken: list[float] = []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(asyncio.get_running_loop().time())

        await asyncio.gather(sleeper(3600), sleeper(60), sleeper(86_400))
        return woken

    assert virtual_time.run(main()) == pytest.approx([60, 3600, 86_400])


def test_where_nobody_can_wake_anybody_that_is_reported():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(main())
