"""The hub in memory: examples of each promise about bounds, order, staleness, and the end of a group."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from atropos_core.errors import DataError, DeadlineExceeded, HubClosed, HubFull
from atropos_core.hub.records import BatchSize, Label
from tests.unit.hubs import Clock, hub, ids, label, opened, payloads, settle
from tests.unit.parts import episode, group, rollout

ONE, TWO, THREE = BatchSize(groups=1), BatchSize(groups=2), BatchSize(groups=3)


def test_a_label_counts_rollouts_and_the_oldest_sampled_token():
    mixed = rollout(2, 3, policy_version=np.array([0, 0, 5, 4, 5], np.int32))  # a weight update came in between
    aged = replace(group(7, [1.0]), episodes=(episode(1.0, "", rollout(version=5), mixed),))
    found = Label.of(aged)
    assert found == Label("words", 2, aged.size_bytes, 4, 7, "train-7"), "what was not sampled has no version"
    assert Label.of(aged, 12).size_bytes == 12
    undrawn = replace(aged, draw=replace(aged.draw, id=-1))
    assert Label.of(undrawn).draw is None


@pytest.mark.parametrize("wrong", [{}, {"groups": 1, "sequences": 1}, {"groups": 0}, {"sequences": -1}])
def test_a_batch_is_wanted_in_groups_or_in_sequences(wrong):
    with pytest.raises(DataError, match="a batch is one or more"):
        BatchSize(**wrong)


# -- leases


async def test_groups_come_out_in_the_order_in_which_they_went_in():
    one, session = opened()
    for number in "413":
        await one.put(number, label())
    assert payloads(await session.lease(TWO, 0, 1)) == ["4", "1"]
    assert payloads(await session.lease(ONE, 0, 1)) == ["3"]
    assert len(one) == 0


async def test_a_lease_waits_until_there_are_enough_and_takes_none_before():
    one, session = opened()
    await one.put("a", label())
    waiting = asyncio.ensure_future(session.lease(TWO, 0, 10))
    await settle()
    assert not waiting.done()
    assert len(one) == 1
    await one.put("b", label())
    assert payloads(await waiting) == ["a", "b"]


async def test_a_lease_that_is_not_filled_in_time_says_how_many_there_were_and_takes_none():
    one, session = opened()
    await one.put("a", label())
    with pytest.raises(DeadlineExceeded, match=r"no batch of 3 groups within 0.05 s: 1 groups of 1 sequences wait"):
        await session.lease(THREE, 0, 0.05)
    assert one.status().why is not None
    assert payloads(await session.lease(ONE, 0, 1)) == ["a"]
    assert one.status().why is None


async def test_a_lease_that_is_cancelled_takes_nothing():
    one, session = opened()
    waiting = asyncio.ensure_future(session.lease(ONE, 0, 10))
    await settle()
    waiting.cancel()
    await one.put("a", label())
    await settle()
    assert waiting.cancelled()
    assert len(one) == 1


async def test_a_lease_that_is_cancelled_as_it_is_filled_gives_its_groups_back():
    one, session = opened()
    waiting = asyncio.ensure_future(session.lease(ONE, 0, 10))
    await settle()
    one.try_put("a", label())
    waiting.cancel()
    await settle()
    assert waiting.cancelled()
    assert len(one) == 1


async def test_what_is_given_back_comes_first_again_in_its_old_order():
    one, session = opened()
    for number in "01234":
        await one.put(number, label())
    session.give_back(reversed(ids(await session.lease(THREE, 0, 1))))
    assert payloads(await session.lease(BatchSize(groups=5), 0, 1)) == list("01234")


async def test_leases_given_back_one_after_another_still_come_out_oldest_first():
    one, session = opened()
    for number in "0123":
        await one.put(number, label())
    first, second = await session.lease(TWO, 0, 1), await session.lease(ONE, 0, 1)
    session.give_back(ids(first))
    session.give_back(ids(second))
    assert payloads(await session.lease(BatchSize(groups=4), 0, 1)) == list("0123")


async def test_a_group_given_back_can_fill_a_lease_that_waits():
    one, session = opened()
    await one.put("a", label())
    leased = await session.lease(ONE, 0, 1)
    waiting = asyncio.ensure_future(session.lease(ONE, 0, 10))
    await settle()
    session.give_back(ids(leased))
    assert payloads(await waiting) == ["a"]


# -- bounds


async def test_a_hub_too_small_for_a_step_says_so_instead_of_waiting():
    one, session = opened(200)
    await one.put("a", label())
    await one.put("b", label())
    third = asyncio.ensure_future(one.put("c", label()))
    await settle()
    assert not third.done(), "a full hub makes producers wait"
    with pytest.raises(
        HubFull, match=r"the hub is full .* with 2 groups waiting, and the step needs 3 groups"
    ) as caught:
        await session.lease(THREE, 0, 5)
    assert "Raise hub.size_mb, lower training.groups_per_step" in str(caught.value)
    assert not third.done()
    third.cancel()


async def test_a_large_group_that_waits_for_room_does_not_keep_from_the_trainer_what_fits_beside_it():
    one, session = opened(6400)
    for number in range(10):
        await one.put(str(number), label("words" if number < 3 else "code"))
    large = asyncio.ensure_future(one.put("large", label(size_bytes=6000)))
    await settle()
    behind = [asyncio.ensure_future(one.put(f"behind {number}", label())) for number in range(3)]
    beside = [asyncio.ensure_future(one.put(f"beside {number}", label("code"))) for number in range(9)]
    await settle()
    assert len(one) == 10, "as long as nobody needs them they wait behind it"
    batch = payloads(await session.lease(BatchSize(groups=16), 0, 5))
    assert len(batch) == 16
    await settle()
    assert sum(put.done() for put in behind + beside) == 6, "no more pass it than the batch lacked"
    session.commit(session.holds)
    await asyncio.wait_for(large, 30)
    for put in behind + beside:
        put.cancel()


async def test_what_passes_a_large_group_into_a_batch_is_not_stale():
    dropped: list[tuple[str, str]] = []
    one, session = opened(1000, max_staleness=0, dropped=dropped)
    await one.put("held", label(version=1, size_bytes=500))
    large = asyncio.ensure_future(one.put("large", label(version=1, size_bytes=900)))
    await settle()
    others = [asyncio.ensure_future(one.put(name, label(version=at))) for name, at in (("old", 0), ("new", 1))]
    await settle()
    assert payloads(await session.lease(TWO, 1, 5)) == ["held", "new"]
    assert dropped == [("old", "stale")]
    await asyncio.gather(*others)
    large.cancel()


async def test_a_trainer_that_waits_beside_a_large_group_gets_what_comes_in_later():
    one, session = opened(6400)
    await one.put("first", label())
    large = asyncio.ensure_future(one.put("large", label(size_bytes=6350)))
    await settle()
    waiting = asyncio.ensure_future(session.lease(THREE, 0, 10))
    await settle()
    assert not waiting.done(), "a giant does not prove the hub too small"
    await one.put("second", label(), deadline_s=1)
    assert one.try_put("third", label("code")) is not None
    assert payloads(await waiting) == ["first", "second", "third"]
    large.cancel()


async def test_leased_and_trained_groups_count_until_they_are_committed():
    one, session = opened(200)
    await one.put("a", label())
    await one.put("b", label())
    waiting = asyncio.ensure_future(one.put("c", label()))
    leased = ids(await session.lease(ONE, 0, 1))
    await settle()
    assert not waiting.done(), "a lease frees nothing"
    session.trained(leased)
    await settle()
    assert not waiting.done(), "it may have to be served again"
    assert one.status().held_bytes == 200
    assert session.commit(leased) == 1
    await waiting
    assert one.status().held_bytes == 200


async def test_a_run_that_runs_its_draws_again_lets_go_of_what_is_trained():
    one, session = opened(200, keep_trained=False)
    await one.put("a", label())
    leased = ids(await session.lease(ONE, 0, 1))
    session.trained(leased)
    session.trained(leased)
    assert one.status().held_bytes == 0
    assert one.status().trained == 1
    assert session.commit() == 1
    assert one.status().committed == 1


async def test_a_full_hub_takes_no_more_and_one_byte_less_is_enough_to_be_full():
    exact, tight = hub(200), hub(199)
    for one in (exact, tight):
        await one.put("a", label())
    await exact.put("b", label(), deadline_s=1)
    with pytest.raises(HubFull, match=r"had no room for a group of 'words' .* in time: 0.0 of 0.0 MB"):
        await tight.put("b", label(), deadline_s=0.05)
    assert tight.status().held_bytes == 100, "whoever gave up waiting left nothing behind"
    assert tight.status().puts_waiting == 0
    assert len(tight) == 1


async def test_sequences_have_a_bound_of_their_own():
    one = hub(sequences=10)
    await one.put("a", label(sequences=6))
    assert not one.admits(label(sequences=5))
    assert one.admits(label(sequences=4))
    assert one.try_put("b", label(sequences=5)) is None
    with pytest.raises(DataError, match="11 sequences, more than the whole hub"):
        await one.put("c", label(sequences=11))


async def test_sequences_are_free_again_once_their_groups_are_committed_or_dropped():
    one, session = opened(sequences=10, max_staleness=None)
    for _ in range(3):
        await one.put("a", label(sequences=6))
        await one.put("b", label(sequences=4))
        committed, dropped = ids(await session.lease(TWO, 0, 1))
        session.trained([committed])
        session.commit([committed])
        session.drop([dropped], "damaged")
        assert one.status().held_sequences == 0


async def test_a_group_that_could_never_fit_is_refused_at_once():
    with pytest.raises(DataError, match=r"task 't' holds .* more than the whole hub") as caught:
        await hub(1000).put("a", Label("words", 1, 1001, task="t"))
    assert "hub.size_mb" in str(caught.value)


@pytest.mark.parametrize("sequences", [0, -1])
async def test_a_group_without_sequences_is_refused(sequences):
    with pytest.raises(DataError, match="sequences"):
        await hub().put("a", label(sequences=sequences))


async def test_a_large_group_is_not_passed_by_for_ever_by_small_ones():
    one, session = opened(1000)
    for number in range(8):
        await one.put(str(number), label())
    large = asyncio.ensure_future(one.put("large", label(size_bytes=500)))
    await settle()
    small = asyncio.ensure_future(one.put("small", label()))
    await settle()
    assert not small.done(), "there is room for it, but the large one came first"
    for _ in range(3):
        session.commit(ids(await session.lease(ONE, 0, 1)))
    await asyncio.wait_for(large, 30)
    small.cancel()


async def test_every_group_passes_exactly_once_however_producers_and_trainer_interleave():
    one, session = opened(500, keep_trained=False)
    most = 0

    async def produce(start: int) -> None:
        for number in range(start, start + 20):
            await one.put(str(number), label())
            await asyncio.sleep(0)

    async def train() -> list[int]:
        nonlocal most
        seen: list[int] = []
        while len(seen) < 60:
            leased = await session.lease(THREE, 0, 10)
            most = max(most, one.status().held_bytes)
            seen += [int(number) for number in payloads(leased)]
            await asyncio.sleep(0)
            session.trained(ids(leased))
        return seen

    *_, seen = await asyncio.gather(produce(0), produce(20), produce(40), train())
    assert sorted(seen) == list(range(60))
    for start in (0, 20, 40):
        own = [number for number in seen if start <= number < start + 20]
        assert own == sorted(own), "each producer's groups stay in order"
    assert most == 500, "the bound was reached, and never passed"
    assert one.status().held_bytes == 0


async def test_a_checkpoint_is_due_once_trained_groups_take_more_than_half():
    one, session = opened(1000)
    for number in range(6):
        await one.put(str(number), label())
    leased = ids(await session.lease(BatchSize(groups=6), 0, 1))
    session.trained(leased[:5])
    assert not session.commit_due
    session.trained(leased)
    assert session.commit_due
    session.commit(leased[:1])
    assert not session.commit_due


# -- keys


async def test_a_key_seen_before_returns_the_former_id_and_stores_nothing():
    one, session = opened()
    first = await one.put("a", label(), key="k")
    assert await one.put("b", label(), key="k") == first
    assert one.knows("k")
    assert not one.knows("other")
    session.commit(ids(await session.lease(ONE, 0, 1)))
    assert await one.put("c", label(), key="k") == first, "also when it is long settled"
    assert len(one) == 0


async def test_the_same_key_twice_at_a_full_hub_is_stored_once():
    one, session = opened(100)
    await one.put("a", label())
    both = [asyncio.ensure_future(one.put("b", label(), key="k")) for _ in range(2)]
    await settle()
    session.commit(ids(await session.lease(ONE, 0, 1)))
    first, second = await asyncio.wait_for(asyncio.gather(*both), 30)
    assert first == second
    assert len(one) == 1


async def test_where_the_first_of_two_with_one_key_gives_up_the_second_takes_its_place():
    one, session = opened(100)
    await one.put("a", label())
    first = asyncio.ensure_future(one.put("b", label(), key="k"))
    await settle()
    second = asyncio.ensure_future(one.put("b", label(), key="k"))
    await settle()
    first.cancel()
    await settle()
    session.commit(ids(await session.lease(ONE, 0, 1)))
    assert await asyncio.wait_for(second, 30) == 1


# -- staleness


@pytest.mark.parametrize(("max_staleness", "kept"), [(0, "3"), (1, "23"), (2, "123"), (None, "123")])
async def test_no_group_is_leased_that_is_older_than_the_bound(max_staleness, kept):
    dropped: list[tuple[str, str]] = []
    one, session = opened(max_staleness=max_staleness, dropped=dropped)
    for version in (1, 2, 3):
        await one.put(str(version), label(version=version))
    await one.put("unknown", label())
    assert payloads(await session.lease(BatchSize(groups=len(kept) + 1), 3, 1)) == [*kept, "unknown"]
    assert dropped == [(number, "stale") for number in "123" if number not in kept]
    status = one.status()
    assert status.dropped.get("stale", 0) == len(dropped)
    assert status.held_bytes == 100 * (len(kept) + 1)


async def test_a_stale_group_that_is_dropped_makes_room_for_one_that_waits():
    one, session = opened(100)
    await one.put("old", label(version=0))
    waiting = asyncio.ensure_future(one.put("new", label(version=1)))
    await settle()
    assert payloads(await session.lease(ONE, 1, 1)) == ["new"]
    await waiting


async def test_what_was_given_back_may_have_become_stale():
    dropped: list[tuple[str, str]] = []
    one, session = opened(dropped=dropped)
    await one.put("0", label(version=0))
    await one.put("1", label(version=1))
    session.give_back(ids(await session.lease(ONE, 0, 1)))
    assert payloads(await session.lease(ONE, 1, 1)) == ["1"]
    assert dropped == [("0", "stale")]


async def test_what_is_given_back_after_it_has_become_stale_is_not_served_again():
    dropped: list[tuple[str, str]] = []
    one, session = opened(dropped=dropped)
    await one.put("0", label(version=0))
    leased = ids(await session.lease(ONE, 0, 1))
    await one.put("1", label(version=1))
    await session.lease(ONE, 1, 1)  # here it is too old, and with the trainer
    session.give_back(leased)
    assert session.try_lease(ONE, 1) is None
    assert dropped == [("0", "stale")]


async def test_versions_are_not_remembered_of_groups_that_have_left():
    one, session = opened(max_staleness=1_000_000)
    for number in range(5000):
        one.try_put("a", label(version=number))
        session.commit(ids(session.try_lease(ONE, number) or []))
    assert len(one._by_version) <= 1001
    for version in (0, 1):
        one.try_put(str(version), label(version=version))
    for _ in range(2000):
        session.give_back(ids(session.try_lease(TWO, 2) or []))
    assert len(one._by_version) <= 1005
    one.max_staleness = 0
    assert payloads(session.try_lease(ONE, 1) or []) == ["1"], "what waits is still found stale"


@pytest.mark.parametrize("name", ["\ud800", "half \udfff"])
async def test_a_name_that_no_file_could_hold_is_refused_to_its_sender_alone(name):
    one, session = opened(100)
    await one.put("a", label())
    for bad in (label(name), replace(label(), task=name)):
        with pytest.raises(DataError, match=r"no Unicode text"):
            await one.put("b", bad, deadline_s=1)
    with pytest.raises(DataError, match=r"no Unicode text"):
        one.share(name)
    session.commit(ids(await session.lease(ONE, 0, 1)))
    assert await one.put("c", label(), key=name) == await one.put("c", label(), key=name)


# -- the end


async def test_counts_go_on_after_a_resume():
    one, session = opened(keep_trained=False)
    await one.put("a", label())
    session.trained(ids(await session.lease(ONE, 0, 1)))
    assert one.state() == {"next": 1, "committed": 1, "stale": 0}, "what the checkpoint that commits it will hold"
    resumed, session = opened(keep_trained=False)
    resumed.load(json.loads(json.dumps(one.state())))
    await resumed.put("b", label())
    leased = await session.lease(ONE, 0, 1)
    assert ids(leased) == [1], "an id is never given twice"
    session.trained(ids(leased))
    session.commit()
    assert resumed.state() == {"next": 2, "committed": 2, "stale": 0}


async def test_closing_wakes_everyone_who_waits():
    full, empty = hub(100), hub()
    await full.put("a", label())
    session = empty.open("trainer")
    waiting = [asyncio.ensure_future(full.put("b", label())), asyncio.ensure_future(session.lease(TWO, 0, 60))]
    await settle()
    for one in (full, empty):
        one.stop()
    for task in waiting:
        with pytest.raises(HubClosed):
            await asyncio.wait_for(task, 30)
    for late in (full.put("c", label()), session.lease(ONE, 0, 1)):
        with pytest.raises(HubClosed):
            await late
    full.stop()


async def test_status_says_what_is_where():
    clock = Clock()
    one, session = opened(clock=clock)
    await one.put("a", label("math", 4, version=3))
    clock.now = 5.0
    await one.put("b", label("code", 2))
    await one.put("c", label("code", 2))
    session.trained(ids(await session.lease(ONE, 3, 1)))
    clock.now = 7.0
    status = one.status()
    assert (status.groups, status.sequences, status.size_bytes) == (2, 4, 200)
    assert (status.leased, status.trained, status.committed, status.held_bytes) == (0, 1, 0, 300)
    assert status.oldest_s == 2.0
    assert (status.environments["code"].groups, status.environments["math"].held_bytes) == (2, 100)
    assert [found for _, found in one.labels()] == [label("math", 4, version=3), label("code", 2), label("code", 2)]


async def test_what_comes_in_for_a_stale_group_is_not_leased_where_it_is_stale_itself():
    dropped: list[tuple[str, str]] = []
    one, session = opened(100, dropped=dropped)
    await one.put("old", label(version=0))
    others = [asyncio.ensure_future(one.put(name, label(version=at))) for name, at in (("as old", 0), ("fresh", 5))]
    await settle()
    assert payloads(await session.lease(BatchSize(groups=1), 5, 1)) == ["fresh"]
    assert dropped == [("old", "stale"), ("as old", "stale")]
    await asyncio.gather(*others)
