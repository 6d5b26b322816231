"""Sessions of the hub: one trainer at a time, and nothing that was not committed is lost with it."""

from __future__ import annotations

import asyncio

import pytest

from atropos_core.errors import DataError, LeaseLost
from atropos_core.hub.ledger import RESUME
from atropos_core.hub.records import BatchSize
from tests.unit.hubs import Clock, ids, label, opened, payloads, settle

ONE, ALL = BatchSize(groups=1), BatchSize(groups=4)


async def test_a_new_session_takes_over_what_the_one_before_had_not_committed():
    one, first = opened()
    for number in "0123":
        await one.put(number, label())
    leased = ids(await first.lease(BatchSize(groups=3), 0, 1))
    first.trained(leased[:2])
    second = one.open("trainer", committed=leased[:1])
    assert second.number == first.number + 1
    assert one.status().committed == 1, "what the opener has in its checkpoint is settled"
    assert payloads(await second.lease(BatchSize(groups=3), 0, 1)) == ["1", "2", "3"]
    for call in (first.give_back, first.trained, first.commit):
        with pytest.raises(LeaseLost, match=r"session 1 of 'trainer' is over: session 2 was opened"):
            call(leased)
    with pytest.raises(LeaseLost):
        await first.lease(ONE, 0, 1)
    with pytest.raises(LeaseLost):
        one.session(1)
    assert one.session(2) is second


async def test_what_was_served_again_is_still_settled_by_the_checkpoint_that_has_it():
    clock = Clock()
    one, first = opened(clock=clock, lease_s=10.0)
    await one.put("a", label())
    leased = ids(await first.lease(ONE, 0, 1))
    first.trained(leased)
    clock.now = 11.0
    one.tick()
    other = one.open("another trainer")
    assert ids(await other.lease(ONE, 0, 1)) == leased
    one.open("trainer", committed=[*leased, 77])
    assert one.status().committed == 1
    assert one.status().held_bytes == 0


async def test_a_session_that_is_silent_for_too_long_is_over_and_its_groups_wait_again():
    clock = Clock()
    one, session = opened(clock=clock, lease_s=10.0)
    for number in "01":
        await one.put(number, label())
    leased = ids(await session.lease(BatchSize(groups=2), 0, 1))
    for clock.now in (9.0, 18.0, 27.0):
        session.renew()
    session.trained(leased[:1])
    clock.now = 37.0
    one.tick()
    assert one.current is session, "the bound itself is not past it"
    clock.now = 37.1
    one.tick()
    assert one.current is None
    assert len(one) == 2
    with pytest.raises(LeaseLost, match=r"it was not renewed for 10 s") as caught:
        session.commit(leased)
    assert "Resume the trainer" in str(caught.value)


async def test_a_session_notices_its_own_end_before_anyone_ticks():
    clock = Clock()
    one, session = opened(clock=clock, lease_s=10.0)
    await one.put("a", label())
    leased = ids(await session.lease(ONE, 0, 1))
    clock.now = 10.1
    with pytest.raises(LeaseLost):
        session.commit(leased)
    assert len(one) == 1
    with pytest.raises(LeaseLost, match="session 1 is over"):
        one.session(1)


async def test_a_lease_that_waits_ends_with_its_session():
    one, session = opened()
    waiting = asyncio.ensure_future(session.lease(ONE, 0, 60))
    await settle()
    newer = one.open("newer")
    with pytest.raises(LeaseLost, match="'newer'"):
        await asyncio.wait_for(waiting, 30)
    await one.put("a", label())
    assert payloads(await newer.lease(ONE, 0, 1)) == ["a"]


async def test_a_session_that_is_closed_leaves_its_groups():
    one, session = opened()
    await one.put("a", label())
    await session.lease(ONE, 0, 1)
    session.close()
    session.close()
    assert len(one) == 1
    assert one.current is None


async def test_each_call_may_be_repeated():
    one, session = opened()
    for number in "0123":
        await one.put(number, label())
    leased = ids(await session.lease(ALL, 0, 1))
    session.give_back(leased[3:])
    session.give_back(leased[3:])
    session.trained(leased[:3])
    session.trained(leased[:3])
    assert session.holds == dict.fromkeys(leased[:3], "trained")
    assert session.commit(leased[:2]) == 2
    assert session.commit(leased[:2]) == 0
    session.trained(leased[:2])
    assert one.status().committed == 2
    assert session.commit() == 1, "without ids: everything that was trained"
    assert len(one) == 1


async def test_what_is_dropped_is_counted_under_its_cause_and_never_as_committed():
    dropped: list[tuple[str, str]] = []
    one, session = opened(300, dropped=dropped)
    for number in "012":
        await one.put(number, label())
    leased = ids(await session.lease(BatchSize(groups=2), 0, 1))
    session.trained(leased[:1])
    waiting = asyncio.ensure_future(one.put("3", label()))
    await settle()
    assert session.drop([*leased, 2, 2, 77], "other_run") == 3
    assert session.drop(leased, "other_run") == 0
    await waiting
    assert dropped == [(number, "other_run") for number in "012"]
    status = one.status()
    assert (status.committed, status.dropped, status.held_bytes, status.trained) == (0, {"other_run": 3}, 100, 0)
    one.open("newer")
    with pytest.raises(LeaseLost):
        session.drop([3], "other_run")


async def test_a_session_of_another_hub_gets_that_this_one_never_opened_it():
    one, _ = opened()
    with pytest.raises(LeaseLost, match="session 7 is over: it is none of this hub, which has opened 1"):
        one.session(7)


async def test_a_group_that_is_not_leased_cannot_be_trained_and_a_trained_one_not_given_back():
    one, session = opened()
    number = await one.put("a", label())
    with pytest.raises(LeaseLost, match=f"group {number} is not leased to session 1"):
        session.trained([number])
    await session.lease(ONE, 0, 1)
    session.trained([number])
    with pytest.raises(DataError, match="are trained"):
        session.give_back([number])


def test_a_session_that_is_over_says_why_by_its_number() -> None:
    clock = Clock()
    one, _ = opened(lease_s=10.0, clock=clock)
    clock.now = 11.0
    said = {}
    for number in (1, 7):
        with pytest.raises(LeaseLost) as caught:
            one.session(number)
        said[number] = caught.value
    one.open("another")
    with pytest.raises(LeaseLost) as caught:
        one.session(1)
    assert [Exception.__str__(error) for error in (said[1], said[7], caught.value)] == [
        "session 1 is over: it was silent for too long.",
        "session 7 is over: it is none of this hub, which has opened 1.",
        "session 1 is over: session 2 was opened.",
    ]
    assert {error.remedy for error in (said[1], said[7], caught.value)} == {RESUME}


def test_an_environment_that_is_forgotten_keeps_no_share_of_batches() -> None:
    one, _ = opened()
    one.share("words", weight=3.0, minimum=0.5)
    assert one.try_put("a", label("words")) is not None, "what it has sent stays, and with it its queue"
    one.forget("words")
    queue = one._queues.queue("words", 0.0)
    assert (queue.weight, queue.minimum, queue.registered) == (1.0, 0.0, False)
