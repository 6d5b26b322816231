"""The state that the server's endpoints share: leases whose answers are lost, draws that come back, trainers that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.codec import encode_bytes
from atropos_core.errors import DataError, HubFull, LeaseLost, TokenizerMismatch
from atropos_core.hub.records import Label
from atropos_core.types import Draw, ScoredGroup
from atropos_trajectory_api.groups.frame_check import Checked
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.service.service import Answer, Service, Trainer
from atropos_trajectory_api.service.workers import Policy
from atropos_trajectory_client.client import NOT_WANTED
from plugins.trajectory_api.tests.sent_groups import SAMPLING, VOCABULARY, drawn, group_of

WORKER = {"name": "w", "environment": "words", "tasks": 9}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def service(clock: Callable[[], float] = Clock(), **options: Any) -> Service:  # noqa: B008 - one that stands still
    return Service(ServeOptions(journal=False, **options), clock=clock)


def trainer(holder: str = "run", **changes: Any) -> Trainer:
    usual: dict[str, Any] = {
        "policy": Policy("print", VOCABULARY, "tiny"), "group_size": 4, "min_group": 1, "sampling": SAMPLING,
        "batch_groups": 2, "max_staleness": 1, "max_token_len": 64,
    }  # fmt: skip
    return Trainer(holder=holder, **{**usual, **changes})


async def put(of: Service, draw: Draw, *, key: str | None = None, worker: str = "", version: int = 0) -> int:
    frame = encode_bytes(group_of(draw, version=version))
    return await of.put(frame, of.read(frame), key=key, worker=worker, deadline_s=0.0)


async def lease(of: Service, number: int, groups: int = 1, **more: Any) -> Answer:
    usual: dict[str, Any] = {"version": 0, "wait_s": 0.0, "holding": set(), "seen": 0}
    return await of.lease(number, groups, **{**usual, **more})


def failure(draw: Draw) -> ScoredGroup:
    return ScoredGroup(draw, group_of(draw).task, (), np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"hub_mb": 0.0001}, "Raise --hub-mb, or"),
        ({"hub_sequences": 3}, "Raise --hub-sequences, or"),
        ({"hub_mb": 0.0001, "hub_sequences": 3}, "Raise --hub-mb and --hub-sequences, or"),
    ],
)
async def test_a_group_that_never_fits_is_refused_with_the_flags_that_make_room_for_it(bounds, named):
    with pytest.raises(DataError, match="more than the whole hub") as caught:
        await put(service(**bounds), drawn(-1))
    assert named in str(caught.value)


@pytest.mark.parametrize(("flag", "room"), [("--hub-mb", 1.2e-6), ("--hub-sequences", None)])
async def test_a_hub_too_small_for_a_step_names_the_flag_that_makes_room_for_it(flag, room):
    size = len(encode_bytes(group_of(drawn(-1))))
    of = service(**({"hub_mb": room * size} if room else {"hub_sequences": 5}))
    number = of.open_session(trainer(), (), 0)
    await put(of, drawn(-1))
    frame = encode_bytes(group_of(drawn(-2)))
    waiting = asyncio.ensure_future(of.put(frame, of.read(frame), deadline_s=5.0))
    await asyncio.sleep(0)
    with pytest.raises(HubFull, match="neither can continue") as caught:
        await lease(of, number, 2, wait_s=5.0)
    assert f"Raise {flag}, lower training.groups_per_step" in str(caught.value)
    waiting.cancel()


async def test_groups_in_an_answer_that_never_arrived_are_leased_again():
    of = service()
    number = of.open_session(trainer(), (), 0)
    for i in range(3):
        await put(of, drawn(-1), key=f"k{i}")
    first = await lease(of, number, 2)
    again = await lease(of, number, 2)  # the trainer holds nothing, as far as it knows
    assert [e.id for e in again.entries] == [e.id for e in first.entries] == [0, 1]
    after = await lease(of, number, 1, holding={0, 1})
    assert [e.id for e in after.entries] == [2]


async def test_a_wait_in_vain_says_why():
    of = service()
    number = of.open_session(trainer(), (), 0)
    answer = await lease(of, number, 5)
    assert answer.entries == [] and "5 groups are wanted" in (answer.why or "")


async def test_two_groups_of_one_draw_count_once_and_a_repeated_key_gets_the_first_answer():
    of = service()
    of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0)], {})
    assert await put(of, drawn(0), key="a") == 0
    assert await put(of, drawn(0), key="a") == 0
    assert await put(of, drawn(0), key="b") == NOT_WANTED
    assert of.hub.status().groups == 1


async def test_notices_of_draws_that_bring_no_group_are_sent_until_they_have_arrived():
    of = service()
    worker = of.register(WORKER)
    number = of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0), drawn(1)], {})
    assert [d.id for d in await of.take(worker, 2, running=set(), wait_s=0.0)] == [0, 1]
    of.failed(worker, failure(drawn(0)))
    first = await lease(of, number)
    assert [group.draw for group in first.failed] == [drawn(0)]
    again = await lease(of, number)
    assert [group.draw for group in again.failed] == [drawn(0)]
    assert (await lease(of, number, seen=again.posted)).failed == []


async def test_a_stale_group_gives_a_notice_of_its_draw():
    of = service()
    number = of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0)], {})
    await put(of, drawn(0), version=0)
    answer = await lease(of, number, version=5)
    answer = answer if answer.dropped else await lease(of, number, version=5)
    assert answer.dropped == [{"draw": 0, "cause": "stale"}]
    assert of.draws.present == []


async def test_what_was_drawn_for_another_run_is_not_for_this_one():
    of = service()
    of.open_session(trainer("first"), (), 0)
    of.draws.offer([drawn(0)], {})
    await put(of, drawn(0))
    await put(of, drawn(-1))
    await of.put(b"old", Checked(None, Label("old", 1, 3, None, draw=-1)), deadline_s=0.0)
    number = of.open_session(trainer("second"), (), 0)
    of.draws.offer([drawn(0)], {})
    assert [d.id for d in await of.take(of.register(WORKER), 5, running=set(), wait_s=0.0)] == [0]
    answer = await lease(of, number, 2)
    assert [e.id for e in answer.entries] == [1, 2]
    assert of.hub.status().groups == 0


async def test_what_arrives_while_one_run_gives_way_to_another_is_not_for_the_other():
    of = service(hub_sequences=4)
    first = of.open_session(trainer("first"), (), 0)
    of.draws.offer([drawn(0)], {})
    await put(of, drawn(-1))
    [filling] = (await lease(of, first)).entries
    frame = encode_bytes(group_of(drawn(0)))
    late = asyncio.create_task(of.put(frame, of.read(frame), deadline_s=30.0))
    await asyncio.sleep(0.01)
    number = of.open_session(trainer("second"), (), 0)
    of.draws.offer([drawn(0)], {})
    [again] = (await lease(of, number)).entries
    assert again.id == filling.id
    of.commit(number, [again.id])
    await late
    assert of.draws.present == []
    assert (await lease(of, number)).entries == []
    assert [d.id for d in await of.take(of.register(WORKER), 5, running=set(), wait_s=0.0)] == [0]


async def test_only_the_hub_that_gave_them_knows_committed_ids():
    of = service()
    for _ in range(2):
        await put(of, drawn(-1))
    of.open_session(trainer(), [0], 0, hub_id="another")
    assert of.hub.status().groups == 2
    of.open_session(trainer(), [0], 0, hub_id=of.hub_id)
    assert of.hub.status().groups == 1


async def test_a_resumed_run_learns_which_of_its_draws_have_a_group_and_gets_them():
    of = service()
    number = of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0), drawn(1), drawn(2)], {})
    ids = [await put(of, drawn(i)) for i in range(3)]
    leased = await lease(of, number, 2)
    of.session(number).trained([e.id for e in leased.entries])
    resumed = of.open_session(trainer(), [ids[0]], 1)  # its checkpoint holds the first
    assert of.draws.present == [1, 2]
    assert of.draws.offer([drawn(1), drawn(2), drawn(3)], {}) == 1
    assert [e.id for e in (await lease(of, resumed, 2)).entries] == [1, 2]
    with pytest.raises(LeaseLost):
        of.session(number)


async def test_draws_of_a_silent_worker_go_to_others(capsys: pytest.CaptureFixture[str]):
    clock = Clock()
    of = service(clock, silent_s=10)
    of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0)], {})
    silent, other = of.register(WORKER), of.register({**WORKER, "name": "other"})
    assert len(await of.take(silent, 1, running=set(), wait_s=0.0)) == 1
    clock.now = 11.0
    of.workers.find(other.id)
    await of.tick()
    assert "1 draws that it ran go to others" in " ".join(capsys.readouterr().err.split())
    assert [d.id for d in await of.take(other, 1, running=set(), wait_s=0.0)] == [0]
    assert of.workers.find(silent.id) is None


async def test_draws_in_an_answer_that_never_reached_the_worker_are_handed_out_again():
    of = service()
    of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0), drawn(1)], {})
    worker = of.register(WORKER)
    await of.take(worker, 1, running=set(), wait_s=0.0)
    assert [d.id for d in await of.take(worker, 2, running=set(), wait_s=0.0)] == [0, 1]


async def test_a_silent_trainer_loses_its_session_and_its_draws_wait_for_it_no_more():
    clock = Clock()
    of = service(clock, lease_s=10)
    number = of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0)], {})
    clock.now = 11.0
    await of.tick()
    assert of.trainer is None
    with pytest.raises(LeaseLost):
        await lease(of, number)
    assert await of.take(of.register(WORKER), 1, running=set(), wait_s=0.0) == []


async def test_a_worker_with_another_tokenizer_is_refused_whoever_comes_first():
    of = service()
    early = of.register({**WORKER, "tokenizer": "other"})
    of.open_session(trainer(), (), 0)
    assert of.workers.find(early.id) is None
    with pytest.raises(TokenizerMismatch, match="fingerprint other"):
        of.register({**WORKER, "tokenizer": "other"})
    with pytest.raises(TokenizerMismatch, match="vocabulary"):
        of.register({**WORKER, "vocabulary": VOCABULARY + 1})
    of.register({**WORKER, "tokenizer": "print", "vocabulary": VOCABULARY})


async def test_ids_beyond_the_policys_vocabulary_are_refused():
    of = service()
    of.open_session(trainer(policy=Policy("print", VOCABULARY // 2)), (), 0)
    with pytest.raises(DataError, match="outside the policy's vocabulary"):
        await put(of, drawn(-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0}, {"weight": -1.0}, {"minimum": 2}, {"tasks": -1}, {"tasks": True}, {"name": 3},
        {"playing": ["a"]}, {"playing": 1},
    ],
    ids=str,
)  # fmt: skip
async def test_a_registration_that_cannot_be_is_refused(wrong: dict[str, Any]):
    of = service()
    with pytest.raises(DataError):
        of.register({**WORKER, **wrong})
    assert not of.workers.all()


async def test_a_restarted_service_goes_on_where_it_was(tmp_path: Path):
    options = ServeOptions(directory=tmp_path)
    before = Service.open(options)
    number = before.open_session(trainer(), (), 4)
    before.set_version(number, 5)
    before.draws.offer([drawn(0), drawn(1)], {})
    for i in range(2):
        await put(before, drawn(i), key=f"k{i}", version=5)
    [leased] = (await lease(before, number, version=5)).entries
    await before.close()

    after = Service.open(options)
    try:
        assert after.boot != before.boot and after.hub_id == before.hub_id
        assert (after.version, after.vocabulary, after.draws.present) == (5, VOCABULARY, [0, 1])
        assert after.old.registration is not None and after.old.registration.batch_size == 8
        assert await put(after, drawn(0), key="k0", version=5) == leased.id
        [other] = (await lease(after, number, holding={leased.id}, version=5)).entries
        assert other.id == leased.id + 1
        after.session(number).trained([leased.id])
        assert after.commit(number, [leased.id]) == 1
        assert after.draws.present == [1]
    finally:
        await after.close()


async def test_another_runs_groups_do_not_stand_in_for_draws_after_a_restart(tmp_path: Path):
    first = Service.open(ServeOptions(directory=tmp_path))
    first.open_session(trainer("one"), (), 0)
    first.draws.offer([drawn(0)], {})
    await put(first, drawn(0), key="a")
    first.open_session(trainer("two"), (), 0)
    await first.close()
    again = Service.open(ServeOptions(directory=tmp_path))
    assert again.draws.offer([drawn(0)], {}) == 1, "run two has no group of its draw 0 yet"
    await again.close()


async def test_a_group_whose_worker_left_while_it_was_being_written_is_not_run_again(tmp_path: Path):
    of = Service.open(ServeOptions(directory=tmp_path, sync="always"))
    of.open_session(trainer(), (), 0)
    of.draws.offer([drawn(0)], {})
    putting = asyncio.create_task(put(of, drawn(0), key="a"))
    while not of.hub.knows("a"):
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await put(of, drawn(0), key="b") == NOT_WANTED, "another rollout of it"
    assert of.hub.status().groups == 1
    await of.close()
