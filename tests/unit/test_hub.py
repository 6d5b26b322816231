"""The in-process hub: examples of each promise, and a model that hypothesis plays against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from atropos_core.errors import DataError, DeadlineExceeded, HubClosed
from atropos_core.hub import Hub
from atropos_core.types import ScoredGroup
from tests.unit.parts import episode, group, rollout

ROOM = 1_000_000


def hub(size_bytes: int = ROOM, max_staleness: int = 0, stale: list[ScoredGroup] | None = None) -> Hub:
    return Hub(size_bytes, max_staleness, (stale if stale is not None else []).append)


def numbers(leases: Any) -> list[int]:
    return [lease.group.draw.id for lease in leases]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# -- leases


async def test_a_hub_too_small_for_a_step_says_so_instead_of_waiting():
    size = group(0).size_bytes
    one = hub(size_bytes=2 * size)
    await one.put(group(0))
    await one.put(group(1))
    third = asyncio.ensure_future(one.put(group(2)))
    await settle()
    assert not third.done(), "a full hub makes producers wait"
    waiting = asyncio.ensure_future(one.lease(3, 0, 5))
    with pytest.raises(DataError, match="the hub is full .* with 2 groups waiting, and the step needs 3"):
        await third
    waiting.cancel()


async def test_groups_come_out_in_the_order_in_which_they_went_in():
    one = hub()
    for number in (4, 1, 3):
        await one.put(group(number))
    assert numbers(await one.lease(2, 0, 1)) == [4, 1]
    assert numbers(await one.lease(1, 0, 1)) == [3]
    assert len(one) == 0


async def test_a_lease_waits_until_there_are_enough_and_takes_none_before():
    one = hub()
    await one.put(group(0))
    waiting = asyncio.ensure_future(one.lease(2, 0, 10))
    await settle()
    assert not waiting.done()
    assert len(one) == 1
    await one.put(group(1))
    assert numbers(await waiting) == [0, 1]


async def test_a_lease_that_is_not_filled_in_time_says_how_many_there_were_and_takes_none():
    one = hub()
    await one.put(group(0))
    with pytest.raises(DeadlineExceeded, match=r"the hub got 1 of 3 groups within 0.05 s"):
        await one.lease(3, 0, 0.05)
    assert numbers(await one.lease(1, 0, 1)) == [0]


async def test_a_lease_that_is_cancelled_takes_nothing():
    one = hub()
    waiting = asyncio.ensure_future(one.lease(1, 0, 10))
    await settle()
    waiting.cancel()
    await one.put(group(0))
    await settle()
    assert waiting.cancelled()
    assert len(one) == 1


async def test_what_is_given_back_comes_first_again_in_its_old_order():
    one = hub()
    for number in range(5):
        await one.put(group(number))
    await one.give_back(reversed(await one.lease(3, 0, 1)))
    assert numbers(await one.lease(5, 0, 1)) == [0, 1, 2, 3, 4]


async def test_leases_given_back_one_after_another_still_come_out_oldest_first():
    one = hub()
    for number in range(4):
        await one.put(group(number))
    first, second = await one.lease(2, 0, 1), await one.lease(1, 0, 1)
    await one.give_back(first)
    await one.give_back(second)
    assert numbers(await one.lease(4, 0, 1)) == [0, 1, 2, 3]


async def test_a_group_given_back_can_fill_a_lease_that_waits():
    one = hub()
    await one.put(group(0))
    leases = await one.lease(1, 0, 1)
    waiting = asyncio.ensure_future(one.lease(1, 0, 10))
    await settle()
    await one.give_back(leases)
    assert numbers(await waiting) == [0]


# -- bytes


async def test_leased_groups_count_until_they_were_trained():
    size = group(0).size_bytes
    one = hub(2 * size)
    await one.put(group(0))
    await one.put(group(1))
    waiting = asyncio.ensure_future(one.put(group(2)))
    leases = await one.lease(1, 0, 1)
    await settle()
    assert not waiting.done(), "a lease frees nothing"
    assert one.held_bytes == 2 * size
    await one.trained(leases)
    await waiting
    assert one.held_bytes == 2 * size


async def test_a_full_hub_takes_no_more_and_one_byte_less_is_enough_to_be_full():
    size = group(0).size_bytes
    exact, tight = hub(2 * size), hub(2 * size - 1)
    for one in (exact, tight):
        await one.put(group(0))
    await asyncio.wait_for(exact.put(group(1)), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tight.put(group(1)), 0.05)
    assert tight.held_bytes == size, "whoever gave up waiting left nothing behind"
    assert len(tight) == 1


async def test_a_group_that_could_never_fit_is_refused_at_once():
    with pytest.raises(DataError, match=r"task 'train-7' holds .* more than the whole hub") as caught:
        await hub(1000).put(group(7))
    assert "hub.size_mb" in str(caught.value)


async def test_every_group_passes_exactly_once_however_producers_and_trainer_interleave():
    size = group(0).size_bytes
    one = hub(5 * size)
    most = 0

    async def produce(start: int) -> None:
        for number in range(start, start + 20):
            await one.put(group(number))
            await asyncio.sleep(0)

    async def train() -> list[int]:
        nonlocal most
        seen: list[int] = []
        while len(seen) < 60:
            leases = await one.lease(3, 0, 10)
            most = max(most, one.held_bytes)
            seen += numbers(leases)
            await asyncio.sleep(0)
            await one.trained(leases)
        return seen

    *_, seen = await asyncio.gather(produce(0), produce(20), produce(40), train())
    assert sorted(seen) == list(range(60))
    for start in (0, 20, 40):
        own = [number for number in seen if start <= number < start + 20]
        assert own == sorted(own), "each producer's groups stay in order"
    assert most == 5 * size, "the bound was reached, and never passed"
    assert one.held_bytes == 0


# -- staleness


@pytest.mark.parametrize(("max_staleness", "kept"), [(0, [3]), (1, [2, 3]), (2, [1, 2, 3])])
async def test_no_group_is_leased_that_is_older_than_the_bound(max_staleness, kept):
    dropped: list[ScoredGroup] = []
    one = hub(max_staleness=max_staleness, stale=dropped)
    for version in (1, 2, 3):
        await one.put(group(version, version=version))
    assert numbers(await one.lease(len(kept), 3, 1)) == kept
    assert [each.draw.id for each in dropped] == [number for number in (1, 2, 3) if number not in kept]
    assert one.stale == len(dropped)
    assert one.held_bytes == len(kept) * group(0).size_bytes


async def test_a_group_is_as_old_as_its_oldest_sampled_token():
    mixed = rollout(2, 3, policy_version=np.array([0, 0, 5, 4, 5], np.int32))  # a weight update came in between
    aged = replace(group(0, [1.0]), episodes=(episode(1.0, "", rollout(version=5), mixed),))
    assert aged.oldest_version == 4, "what was not sampled has no version"
    dropped: list[ScoredGroup] = []
    one = hub(max_staleness=0, stale=dropped)
    await one.put(aged)
    with pytest.raises(DeadlineExceeded):
        await one.lease(1, 5, 0.01)
    assert dropped == [aged]


async def test_a_stale_group_that_is_dropped_makes_room_for_one_that_waits():
    one = hub(group(0).size_bytes)
    await one.put(group(0, version=0))
    waiting = asyncio.ensure_future(one.put(group(1, version=1)))
    await settle()
    assert numbers(await one.lease(1, 1, 1)) == [1]
    await waiting


async def test_what_was_given_back_may_have_become_stale():
    dropped: list[ScoredGroup] = []
    one = hub(stale=dropped)
    await one.put(group(0, version=0))
    await one.put(group(1, version=1))
    await one.give_back(await one.lease(1, 0, 1))
    assert numbers(await one.lease(1, 1, 1)) == [1]
    assert [each.draw.id for each in dropped] == [0]


# -- the end of a group


async def test_a_commit_settles_what_was_trained_since_the_last_one():
    one = hub()
    for number in range(3):
        await one.put(group(number))
    await one.trained(await one.lease(2, 0, 1))
    assert one.state() == {"next": 3, "committed": 2, "stale": 0}, "what the checkpoint that commits them will hold"
    assert one.commit() == 2
    assert one.commit() == 0
    await one.trained(await one.lease(1, 0, 1))
    assert one.commit() == 1
    assert one.state()["committed"] == 3


async def test_a_lease_is_settled_once():
    one = hub()
    await one.put(group(0))
    leases = await one.lease(1, 0, 1)
    await one.trained(leases)
    with pytest.raises(KeyError):
        await one.trained(leases)
    with pytest.raises(KeyError):
        await one.give_back(leases)
    assert one.held_bytes == 0


async def test_counts_go_on_after_a_resume():
    one = hub()
    await one.put(group(0))
    await one.trained(await one.lease(1, 0, 1))
    resumed = hub()
    resumed.load(json.loads(json.dumps(one.state())))
    await resumed.put(group(1))
    [lease] = await resumed.lease(1, 0, 1)
    assert lease.id == 1, "an id is never given twice"
    await resumed.trained([lease])
    resumed.commit()
    assert resumed.state() == {"next": 2, "committed": 2, "stale": 0}


async def test_closing_wakes_everyone_who_waits():
    full, empty = hub(group(0).size_bytes), hub()
    await full.put(group(0))
    waiting = [asyncio.ensure_future(full.put(group(1))), asyncio.ensure_future(empty.lease(2, 0, 60))]
    await settle()
    for one in (full, empty):
        await one.close()
    for task in waiting:
        with pytest.raises(HubClosed):
            await asyncio.wait_for(task, 1)
    for late in (full.put(group(2)), empty.lease(1, 0, 1)):
        with pytest.raises(HubClosed):
            await late
    await full.close()


# -- the model

CAPACITY = 4 * 5120


class HubModel(RuleBasedStateMachine):
    """One trainer and any number of producers, against a list in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.dropped: list[ScoredGroup] = []
        self.hub = Hub(CAPACITY, 1, self.dropped.append)
        self.version = 0
        self.drawn = 0
        self.admitted: list[ScoredGroup] = []  # in the order in which the hub took them
        self.waiting: dict[asyncio.Task[None], ScoredGroup] = {}
        self.queue: list[int] = []  # of numbers into `admitted`
        self.leased: dict[int, Any] = {}
        self.stale: list[int] = []
        self.trained = 0
        self.committed = 0

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        made = self.loop.run_until_complete(work)
        self.loop.run_until_complete(settle())
        self.waiting = {task: one for task, one in self.waiting.items() if not task.done()}
        return made

    def size(self, number: int) -> int:
        return self.admitted[number].size_bytes

    @rule(members=st.integers(1, 5), sampled=st.integers(1, 60), behind=st.integers(0, 2))
    def put(self, members: int, sampled: int, behind: int) -> None:
        one = group(self.drawn, [0.0] * members, version=max(self.version - behind, 0), sampled=sampled)
        self.drawn += 1

        async def held() -> None:
            try:
                await self.hub.put(one)
            except (HubClosed, DataError):  # the latter: it does not fit, and a lease waits for more than there is
                return
            self.queue.append(len(self.admitted))
            self.admitted.append(one)

        async def start() -> None:
            self.waiting[asyncio.ensure_future(held())] = one

        self.run(start())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_producer_gives_up(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(list(self.waiting)))
        task.cancel()
        self.run(asyncio.sleep(0))

    @rule(n=st.integers(1, 4))
    def lease(self, n: int) -> None:
        old = [number for number in self.queue if self.version - self.admitted[number].oldest_version > 1]
        self.stale += old
        self.queue = [number for number in self.queue if number not in old]
        if len(self.queue) >= n:
            leases = self.run(self.hub.lease(n, self.version, 0))
            wanted, self.queue = self.queue[:n], self.queue[n:]
            assert [lease.group for lease in leases] == [self.admitted[number] for number in wanted], "oldest first"
            self.leased |= dict(zip(wanted, leases, strict=True))
        else:
            with pytest.raises(DeadlineExceeded):
                self.run(self.hub.lease(n, self.version, 0))
            self.run(asyncio.sleep(0))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True))
        self.run(self.hub.give_back([self.leased.pop(number) for number in chosen]))
        self.queue = sorted([*self.queue, *chosen])

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True))
        self.run(self.hub.trained([self.leased.pop(number) for number in chosen]))
        self.trained += len(chosen)
        self.version += 1

    @rule()
    def commit(self) -> None:
        assert self.hub.commit() == self.trained
        self.committed += self.trained
        self.trained = 0

    @invariant()
    def memory_is_what_is_held_and_never_more_than_the_bound(self) -> None:
        assert self.hub.held_bytes == sum(self.size(number) for number in (*self.queue, *self.leased))
        assert self.hub.held_bytes <= CAPACITY

    @invariant()
    def nobody_waits_who_would_fit(self) -> None:
        for one in self.waiting.values():
            assert self.hub.held_bytes + one.size_bytes > CAPACITY

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        assert len(self.hub) == len(self.queue)
        assert [one.draw.id for one in self.dropped] == [self.admitted[number].draw.id for number in self.stale]
        assert self.hub.stale == len(self.stale)
        assert self.hub.state() == {
            "next": len(self.admitted),
            "committed": self.committed + self.trained,
            "stale": len(self.stale),
        }

    def teardown(self) -> None:
        self.run(self.hub.close())
        assert not self.waiting, "closing lets everyone go"
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.close()


HubModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_the_hub_behaves_as_its_model = HubModel.TestCase
