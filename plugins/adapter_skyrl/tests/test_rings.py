"""Trajectories through shared memory arrive bit by bit as sent, also if their producers are killed. Uses real processes."""

from __future__ import annotations

import asyncio
import os
import statistics
from pathlib import Path

import numpy as np
import pytest

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.rings import RingGroups, in_order, work
from atropos_adapter_skyrl.row_messages import NEWEST, PACK_BYTES, Pack, RowPosition, packed, packs, unpacked
from atropos_adapter_skyrl.source import GroupRequest, RolloutsFailed
from atropos_adapter_skyrl.work_client import WorkClient
from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.errors import ConfigError, DataError, HubFull, ProcessDied
from atropos_core.interfaces import Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Draw, Task
from tests.ring_rows import PARAMS, N, equal, producers, row_of, run


def test_every_field_of_a_row_comes_back_bit_by_bit_and_nothing_is_copied():
    for seed in range(400):
        sent = [
            (row_of(seed + at, at)._replace(last=bool(seed % 2)), RowPosition(at, seed % 3))
            for at in range(1 + seed % 5)
        ]
        found = unpacked(packed(sent))
        for (row, place), back, there in zip(sent, found.rows, found.positions, strict=True):
            assert equal(row, back) and place == there
            assert not back.response.flags.owndata and not back.response.flags.writeable
        counted = np.concatenate([row.versions[row.trained] for row, _ in sent])
        assert (found.oldest, found.newest) == ((counted.min(), counted.max()) if len(counted) else (NEWEST, -1))


def test_a_group_that_is_larger_than_a_slot_goes_in_several_messages():
    trajectories = [[row_of(3000 + at, step, 4000) for step in range(24)] for at in range(16)]
    messages = list(packs(trajectories))
    assert len(messages) > 2 and max(map(len, messages)) < 1.01 * PACK_BYTES
    found = [unpacked(one) for one in messages]
    back = [(*place, row) for pack in found for row, place in zip(pack.rows, pack.positions, strict=True)]
    assert [(member, step) for member, step, _ in back] == [
        (member, step) for member in range(16) for step in range(24)
    ]
    assert all(equal(trajectories[member][step], row) for member, step, row in back)


def test_odd_floats_stay_as_they_are():
    row = row_of(1, 0)._replace(logprobs=np.full(len(row_of(1, 0).response), -0.0, np.float32), reward=-0.0)
    [back] = unpacked(packed([(row, RowPosition(0, 0))])).rows
    assert np.signbit(back.logprobs).all() and np.signbit(back.reward)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"XXXX" + data[4:], lambda data: b"", lambda data: data + b"0"]
)
def test_what_is_no_row_is_refused(damage):
    data = packed([(row_of(3, 1), RowPosition(0, 0))])
    with pytest.raises(DataError, match="malformed rows"):
        unpacked(damage(data))


def placed(*rows):
    return [Pack([row for row, _ in rows], [place for _, place in rows], 0, 0)]


def test_rows_that_come_in_any_order_are_put_in_order_and_a_missing_or_double_one_is_an_error():
    first, last = row_of(1, 0)._replace(last=False), row_of(2, 0)
    rows = [
        (last, RowPosition(1, 1)),
        (first, RowPosition(0, 0)),
        (first, RowPosition(1, 0)),
        (last, RowPosition(0, 1)),
    ]
    assert in_order(placed(*rows), 2, step_wise=True) == [[first, last], [first, last]]
    assert in_order(placed((last, RowPosition(1, 0)), (last, RowPosition(0, 0))), 2, step_wise=False) == [
        [last],
        [last],
    ]
    for wrong, cause in (
        (rows[:3], "incomplete"),
        ([*rows, rows[0]], "out of place"),
        (rows[1:], "incomplete"),
        ([(last, RowPosition(2, 0))], "out of place"),
        ([(last, RowPosition(0, 0)), (last, RowPosition(0, 1)), (last, RowPosition(1, 0))], "member 0 .* more rows"),
    ):
        with pytest.raises(DataError, match=cause):
            in_order(placed(*wrong), 2, step_wise=True)
    with pytest.raises(DataError, match="more rows"):
        in_order(placed(*rows), 2, step_wise=False)


async def test_twenty_thousand_trajectories_with_two_producers_killed_none_lost_none_doubled_all_bit_equal(tmp_path):
    before = _named_memory()
    seen = await run(tmp_path / "rings", 20_000, 2)
    assert (seen.trajectories, seen.groups, seen.wrong) == (20_000, 2_500, 0)
    assert seen.requeued > 0, "and what the two had begun was requested again"
    assert seen.kills == 2 and statistics.median(seen.noticed_s) < 1.0
    assert _named_memory() == before, "and the memory has no name anywhere"
    assert os.listdir(tmp_path / "rings") == [], "what a killed worker had there is gone as well"


def _named_memory():
    """Return the mappings of rings, and the sockets. multiprocessing itself only keeps pipes."""
    open_now = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    sockets = [name for name in open_now if name.startswith(("socket:", "/memfd:"))]
    return Path("/proc/self/maps").read_text().count("memfd:atropos-ring"), len(sockets)


def source_of(folder, **options):
    return RingGroups(SkyRLOptions.model_validate({"source": "rings", "rings": folder, **options}))


def group_request(number=1, n=N):
    return GroupRequest(Draw(number, "none", "train", 0, number), n, True)


async def test_without_a_worker_a_group_is_late_and_raised(tmp_path):
    source = source_of(tmp_path / "rings", deadline_s=0.2, attempts=2)
    await source.open()
    with pytest.raises(RolloutsFailed, match=r"failed 2 times(.|\n)*within 0.2 s; no worker is connected"):
        await source.fetch([group_request()], PARAMS, step_wise=False)
    await source.close()


async def test_a_group_of_weights_that_are_too_old_is_requested_again_and_raised_in_the_end(tmp_path):
    source = source_of(tmp_path / "rings", attempts=3, max_staleness=1)
    await source.open()
    await source.set_version(9)  # the producer's tokens have versions 0 to 2
    with producers(tmp_path / "rings", 1):
        with pytest.raises(RolloutsFailed, match=r"failed 3 times(.|\n)*version 0, but 8 is the oldest"):
            await source.fetch([group_request()], PARAMS, step_wise=False)
        await source.close()


class Printed(Environment):
    def tasks(self, split):
        return [Task(split, ({"role": "user", "content": "Say something."},))]

    async def score(self, task, reply):
        return 0.0


async def keyless(task, episodes):
    raise ConfigError("the judge has no key")


async def test_a_reward_that_its_author_has_to_mend_is_raised_with_its_cause_and_the_worker_goes_on(tmp_path):
    context = RunContext(directory=tmp_path, model=TOY_MODEL)
    rollout_runner = RolloutRunner(
        {"none": Printed()}, [WeightedReward("judge", keyless, 1.0, 20.0)], ToyEngine(ToyEngineOptions(), context),
        ChatTokenizer(TOY_MODEL), deadline_s=20.0, deterministic=False,
    )  # fmt: skip
    source = source_of(tmp_path / "rings", attempts=2, deadline_s=20.0)
    await source.open()
    working = asyncio.create_task(
        work(await asyncio.to_thread(WorkClient.connect, tmp_path / "rings", 2), rollout_runner)
    )
    for _ in range(2):
        with pytest.raises(RolloutsFailed, match=r"failed 2 times(.|\n)*the judge has no key"):
            await source.fetch([group_request(n=2)], PARAMS, step_wise=False)
    await source.close()
    assert await working == 0


async def ended(task, episodes):
    raise ProcessDied("the process of reward 'judge' was killed by SIGKILL")


async def test_a_worker_whose_reward_has_died_ends_with_that_and_does_not_say_that_skyrl_has_gone(tmp_path):
    context = RunContext(directory=tmp_path, model=TOY_MODEL)
    runner = RolloutRunner(
        {"none": Printed()}, [WeightedReward("judge", ended, 1.0, 20.0)], ToyEngine(ToyEngineOptions(), context),
        ChatTokenizer(TOY_MODEL), deadline_s=20.0, deterministic=False,
    )  # fmt: skip
    source = source_of(tmp_path / "rings", deadline_s=20.0)
    await source.open()
    fetching = asyncio.create_task(source.fetch([group_request(n=2)], PARAMS, step_wise=False))
    with pytest.raises(ProcessDied, match="reward 'judge' was killed"):
        await work(await WorkClient.open(tmp_path / "rings", 2), runner)
    assert not fetching.done(), "another worker gets the group"
    fetching.cancel()
    await source.close()


async def test_a_stash_that_is_too_small_is_an_error_with_what_to_do(tmp_path):
    source = source_of(tmp_path / "rings", stash_mb=0.0001)
    await source.open()
    with producers(tmp_path / "rings", 1):
        with pytest.raises(HubFull, match=r"more than the stash's 100"):
            await asyncio.gather(*(source.fetch([group_request(at)], PARAMS, step_wise=False) for at in range(1, 20)))
        await source.close()


async def test_a_sampling_parameter_that_workers_do_not_know_is_refused(tmp_path):
    source = source_of(tmp_path / "rings")
    with pytest.raises(ConfigError, match="repetition_penalty"):
        await source.fetch([group_request()], {**PARAMS, "repetition_penalty": 1.1}, step_wise=False)
