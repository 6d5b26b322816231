"""Who comes into a batch and who into a full hub: weights, minimum allocations, exact sums, the reserve."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, GroupRecord
from atropos_core.hub.session import Session
from tests.unit.hubs import Clock, hub, ids, label, opened, payloads, settle


def fill(one: Hub[str], *environments: str, each: int, sequences: int = 1) -> None:
    for environment in environments:
        for _ in range(each):
            assert one.try_put(environment, label(environment, sequences)) is not None


def leased_now(session: Session[str], groups: int) -> list[GroupRecord[str]]:
    batch = session.try_lease(BatchSize(groups=groups), 0)
    assert batch is not None, "there is a batch now"
    return batch


# -- weights


async def test_without_shares_the_oldest_is_next_whatever_its_environment():
    one, session = opened()
    order = "aabacbca"
    for environment in order:
        await one.put(environment, label(environment))
    assert payloads(await session.lease(BatchSize(groups=len(order)), 0, 1)) == list(order)


async def test_batches_follow_the_weights_in_sequences_not_in_groups():
    one, session = opened()
    one.share("small", weight=1.0)
    one.share("large", weight=2.0)
    fill(one, "small", each=100, sequences=2)
    fill(one, "large", each=100, sequences=8)
    taken: Counter[str] = Counter()
    for _ in range(10):
        for entry in await session.lease(BatchSize(groups=6), 0, 1):
            taken[entry.payload] += entry.label.sequences
    assert taken["large"] / taken["small"] == pytest.approx(2.0, rel=0.1)


async def test_silence_earns_nothing():
    one, session = opened()
    one.share("always")
    one.share("late")
    fill(one, "always", each=80)
    for _ in range(10):
        await session.lease(BatchSize(groups=4), 0, 1)
    fill(one, "late", each=40)
    taken = Counter(payloads(await session.lease(BatchSize(groups=20), 0, 1)))
    assert abs(taken["late"] - taken["always"]) <= 4 + 1, "no more ahead than by one batch and one group"


async def test_a_minimum_that_waits_for_room_in_a_full_hub_holds_no_batch_up():
    """Only the trainer can make room for it: waiting for it would be waiting for oneself."""
    clock = Clock()
    one, session = opened(800, clock=clock, allocation_grace_s=30.0, keep_trained=True)
    fill(one, "long", each=8)
    session.trained(ids(leased_now(session, 4)))
    one.share("short", minimum=0.3)
    waiting = asyncio.ensure_future(one.put("short", label("short")))
    await settle()
    assert not waiting.done(), "the hub is full"
    assert payloads(leased_now(session, 4)) == ["long"] * 4
    session.commit()
    await settle()
    assert waiting.done()


async def test_a_flood_does_not_starve_a_trickle():
    one, session = opened()
    one.share("flood")
    one.share("trickle")
    fill(one, "flood", each=1000)
    for _ in range(20):
        await one.put("trickle", label("trickle"))
        assert "trickle" in payloads(await session.lease(BatchSize(groups=4), 0, 1))


async def test_an_environment_that_is_forgotten_keeps_what_it_sent_in_the_queue():
    one, session = opened()
    one.share("gone", weight=3.0)
    fill(one, "gone", each=2)
    one.forget("gone")
    one.forget("never known")
    assert one.status().environments["gone"].weight == 1.0
    session.commit(ids(await session.lease(BatchSize(groups=2), 0, 1)))
    assert one.status().environments == {}


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"weight": float("nan")}, {"minimum": 1.5}, {"minimum": -0.1}])
def test_a_share_that_means_nothing_is_refused(wrong):
    with pytest.raises(DataError, match="a minimum is a part from 0 to 1|asks for weight"):
        hub().share("words", **wrong)


@dataclass
class FairLane:
    """Of the reference: what waits, as (id, sequences), and the start tag of its first."""

    weight: float
    start: float = 0.0
    waiting: list[tuple[int, int]] = field(default_factory=list)


class FairQueue:
    """Start-time fair queuing as the paper has it, in its plainest form: the group with the least start tag is next,
    tags are virtual time plus what the environment was served before it, and virtual time is where the batch before
    this one began. What comes back was never served."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.lanes = {name: FairLane(weight) for name, weight in weights.items()}
        self.virtual = 0.0
        self.leased: dict[int, tuple[str, int]] = {}

    def put(self, name: str, id: int, sequences: int) -> None:
        lane = self.lanes[name]
        if not lane.waiting:
            lane.start = max(lane.start, self.virtual)
        lane.waiting.append((id, sequences))

    def lease(self, n: int) -> list[int] | None:
        backlogged = [lane for lane in self.lanes.values() if lane.waiting]
        if sum(len(lane.waiting) for lane in backlogged) < n:
            return None
        self.virtual = max(self.virtual, min(lane.start for lane in backlogged))
        chosen = []
        for _ in range(n):
            waiting = [(lane.start, lane.waiting[0][0], name) for name, lane in self.lanes.items() if lane.waiting]
            _, id, name = min(waiting)
            lane = self.lanes[name]
            _, sequences = lane.waiting.pop(0)
            lane.start += sequences / lane.weight
            self.leased[id] = name, sequences
            chosen.append(id)
        return sorted(chosen)

    def give_back(self, ids: list[int]) -> None:
        for id in ids:
            name, sequences = self.leased.pop(id)
            lane = self.lanes[name]
            lane.start -= sequences / lane.weight
            lane.waiting = sorted([*lane.waiting, (id, sequences)])


@given(
    weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 4.0]) for name in "abc"}),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from("abc"), st.sampled_from([1, 8]), st.integers(1, 3)),
            st.tuples(st.just("lease"), st.integers(1, 4)),
            st.tuples(st.just("back"), st.integers(1, 4)),
        ),
        min_size=20,
        max_size=40,
    ),
)
@settings(max_examples=300)
def test_every_batch_is_the_one_that_start_time_fair_queuing_chooses(weights, steps):
    one, session = opened(1 << 40)
    for name, weight in weights.items():
        one.share(name, weight=weight)
    reference = FairQueue(weights)
    for what, *arguments in steps:
        if what == "put":
            name, sequences, times = arguments
            for _ in range(times):
                id = one.try_put(name, label(name, sequences, size_bytes=1))
                assert id is not None
                reference.put(name, id, sequences)
        elif what == "lease":
            entries = session.try_lease(BatchSize(groups=arguments[0]), 0)
            assert (None if entries is None else ids(entries)) == reference.lease(arguments[0])
        else:
            some = list(reference.leased)[-arguments[0] :]
            session.give_back(some)
            reference.give_back(some)


# -- minimum allocations


async def test_a_minimum_is_kept_although_the_weight_is_small():
    one, session = opened()
    one.share("rare", weight=0.01, minimum=0.25)
    one.share("common")
    fill(one, "common", each=100)
    fill(one, "rare", each=100)
    for _ in range(5):
        assert Counter(payloads(await session.lease(BatchSize(groups=8), 0, 1)))["rare"] >= 2
    for _ in range(5):
        assert Counter(payloads(await session.lease(BatchSize(sequences=8), 0, 1)))["rare"] >= 2


async def test_minima_beyond_a_whole_are_scaled_down():
    one, session = opened()
    one.share("a", minimum=0.8, weight=0.01)
    one.share("b", minimum=0.8)
    fill(one, "a", "b", each=50)
    taken = Counter(payloads(await session.lease(BatchSize(groups=10), 0, 1)))
    assert taken == {"a": 5, "b": 5}


async def test_an_environment_with_a_minimum_is_waited_for_then_loses_its_share_aloud_then_gets_it_back(capsys):
    clock = Clock()
    one, session = opened(clock=clock)
    one.share("rare", minimum=0.5)
    one.share("common")
    fill(one, "common", each=50)
    clock.now = 29.0
    with pytest.raises(DeadlineExceeded, match=r"50% of a batch is kept for environment 'rare', which has nothing"):
        await session.lease(BatchSize(groups=4), 0, 0)
    clock.now = 31.0
    assert payloads(await session.lease(BatchSize(groups=4), 0, 1)) == ["common"] * 4
    await session.lease(BatchSize(groups=4), 0, 1)
    assert capsys.readouterr().err.count("'rare' has sent nothing for 30 s and loses its 50% of a batch") == 1
    fill(one, "rare", each=2)
    assert Counter(payloads(await session.lease(BatchSize(groups=4), 0, 1))) == {"common": 2, "rare": 2}
    clock.now = 60.0
    assert session.try_lease(BatchSize(groups=4), 0) is None, "it has sent within the last 30 s"


async def test_a_lease_that_waits_for_a_minimum_goes_on_by_itself_when_the_grace_is_over():
    one, session = opened(allocation_grace_s=0.1)
    one.share("rare", minimum=0.5)
    fill(one, "common", each=4)
    assert payloads(await session.lease(BatchSize(groups=4), 0, 10)) == ["common"] * 4


# -- exact sums


async def lease_sizes(wanted: int, *sizes: int, **more: object) -> list[int]:
    one, session = opened(**more)  # type: ignore[arg-type]
    for size in sizes:
        await one.put(str(size), label(sequences=size))
    return [entry.label.sequences for entry in await session.lease(BatchSize(sequences=wanted), 0, 0)]


async def test_whole_groups_add_up_to_the_requested_sequences_oldest_first():
    assert await lease_sizes(16, 8, 8, 8) == [8, 8]
    assert await lease_sizes(12, 4, 6, 2, 6, 8) == [4, 6, 2]
    assert await lease_sizes(12, 4, 6, 5, 8) == [4, 8], "the oldest is always part of it"


async def test_where_no_number_of_groups_adds_up_the_largest_sum_below_is_taken_and_reported(capsys):
    assert await lease_sizes(20, 8, 8, 8) == [8, 8]
    assert "add up to 20 sequences: batches are smaller" in capsys.readouterr().err
    assert await lease_sizes(20, 24, 8, 8) == [24], "one group that is more than a batch is a batch"


async def test_where_more_of_the_same_sizes_could_add_up_they_are_waited_for_but_not_for_ever():
    clock = Clock()
    one, session = opened(clock=clock)
    for size in (8, 8, 6):
        await one.put(str(size), label(sequences=size))
    with pytest.raises(DeadlineExceeded, match=r"groups of 6, 8 do not add up to it yet"):
        await session.lease(BatchSize(sequences=20), 0, 0)
    clock.now = 31.0
    assert payloads(await session.lease(BatchSize(sequences=20), 0, 0)) == ["8", "8"]
    await one.put("6", label(sequences=6))
    await one.put("8", label(sequences=8))
    assert payloads(await session.lease(BatchSize(sequences=20), 0, 0)) == ["6", "6", "8"]


async def test_a_group_that_fits_no_batch_holds_up_none_and_is_not_passed_over_for_ever():
    clock = Clock()
    one, session = opened(clock=clock)
    for size in (4, *[8] * 10):
        await one.put(str(size), label(sequences=size))
    assert payloads(await session.lease(BatchSize(sequences=16), 0, 0)) == ["8", "8"], "at once"
    clock.now = 29.0
    assert payloads(await session.lease(BatchSize(sequences=16), 0, 0)) == ["8", "8"]
    clock.now = 31.0
    assert payloads(await session.lease(BatchSize(sequences=16), 0, 0)) == ["4", "8"], "a smaller one"
    assert payloads(await session.lease(BatchSize(sequences=16), 0, 0)) == ["8", "8"]


async def test_a_minimum_is_kept_by_groups_that_are_not_the_oldest_where_those_make_no_whole_batch():
    one, session = opened(clock=Clock())
    one.share("rare", minimum=0.25)
    for size in (2, 2, 4):
        await one.put("rare", label("rare", sequences=size))
    for _ in range(3):
        await one.put("common", label("common", sequences=6))
    batch = await session.lease(BatchSize(sequences=10), 0, 0)
    assert sorted((entry.payload, entry.label.sequences) for entry in batch) == [
        ("common", 6),
        ("rare", 2),
        ("rare", 2),
    ]
    one, session = opened(clock=Clock())
    one.share("rare", minimum=0.3)
    for size in (1, 4):
        await one.put("rare", label("rare", sequences=size))
    for _ in range(3):
        await one.put("common", label("common", sequences=6))
    batch = await session.lease(BatchSize(sequences=10), 0, 0)
    assert sorted((entry.payload, entry.label.sequences) for entry in batch) == [("common", 6), ("rare", 4)]


async def test_a_full_hub_gives_a_smaller_batch_rather_than_none():
    one, session = opened(300)
    for size in (8, 8, 6):
        await one.put(str(size), label(sequences=size))
    waiting = asyncio.ensure_future(one.put("late", label(sequences=2)))
    await settle()
    assert payloads(await session.lease(BatchSize(sequences=20), 0, 1)) == ["8", "8"]
    waiting.cancel()


# -- who may come in


async def test_the_last_quarter_of_the_room_is_for_those_below_their_share():
    one, _ = opened(1000)
    one.share("flood")
    one.share("quiet")
    taken = sum(one.try_put("flood", label("flood")) is not None for _ in range(10))
    assert taken == 7
    assert not one.admits(label("flood"))
    fill(one, "quiet", each=3)
    assert one.status().held_bytes == 1000


async def test_an_environment_that_nobody_knew_gets_room_before_one_that_has_much():
    one, session = opened(1000)
    fill(one, "flood", each=10)
    flood = [asyncio.ensure_future(one.put("flood", label("flood"))) for _ in range(5)]
    await settle()
    new = asyncio.ensure_future(one.put("new", label("new")))
    await settle()
    session.commit(ids(await session.lease(BatchSize(groups=1), 0, 1)))
    await asyncio.wait_for(new, 30)
    assert not any(put.done() for put in flood)
    for put in flood:
        put.cancel()


async def test_the_reserve_does_not_stand_between_a_trainer_and_its_batch():
    one, session = opened(1000)
    one.share("only")
    one.share("silent")
    fill(one, "only", each=7)
    waiting = [asyncio.ensure_future(one.put("only", label("only"))) for _ in range(2)]
    await settle()
    assert not any(put.done() for put in waiting)
    assert len(await session.lease(BatchSize(groups=9), 0, 1)) == 9


async def test_everyone_who_waits_for_room_gets_in_in_proportion():
    one, session = opened(400)
    one.share("a")
    one.share("b")
    puts = [asyncio.ensure_future(one.put(name, label(name))) for name in ["a"] * 40 + ["b"] * 40]
    seen: list[str] = []
    for _ in range(20):
        await settle()
        leased = await session.lease(BatchSize(groups=2), 0, 1)
        seen += payloads(leased)
        session.commit(ids(leased))
    assert abs(Counter(seen)["a"] - 20) <= 3
    for put in puts:
        put.cancel()
