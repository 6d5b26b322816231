"""Rows that must not be trained, through a real ring: each is refused with its field and value, and requested again."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.rings import RingGroups
from atropos_adapter_skyrl.row_messages import RowPosition, packed
from atropos_adapter_skyrl.rows import TrainingRow
from atropos_adapter_skyrl.source import GroupRequest, RolloutsFailed
from atropos_adapter_skyrl.work_client import WorkClient
from atropos_core.types import Draw

N, VOCABULARY, NEWEST = 3, 100, 4
PARAMS = {"max_tokens": 8}


def good(member: int) -> TrainingRow:
    trained = np.array([True, True, False, True])
    return TrainingRow(
        np.array([5, 6], np.int32), np.array([7, 8, 9, member], np.int32), trained,
        np.array([-1.5, -0.25, 0, -3], np.float32), np.where(trained, 4, -1).astype(np.int32), 0.5, "stop",
        metrics={"turns": 1.0},
    )  # fmt: skip


def empty(member: int) -> TrainingRow:
    row = good(member)
    return row._replace(**{name: getattr(row, name)[:0] for name in ("response", "trained", "logprobs", "versions")})


def message(rows: list[TrainingRow]) -> bytes:
    return packed([(row, RowPosition(member, 0)) for member, row in enumerate(rows)])


def changed(name: str, value: object, at: int | None = None) -> bytes:
    """Return a group in which the row of member 1 has this value."""
    row = good(1)
    if at is not None:
        column = getattr(row, name).copy()
        column[at] = value
        value = column
    return message([good(0), row._replace(**{name: value}), good(2)])


def with_mask_byte(value: int) -> bytes:
    data = message([good(member) for member in range(N)])
    mask = bytes([1, 1, 0, 1]) * N
    return data.replace(mask, bytes([1, 1, 0, 1, 1, value, 0, 1, 1, 1, 0, 1]))


def packed_with(**changes: object) -> bytes:
    """Return a message with other JSON at its end."""
    data = message([good(member) for member in range(N)])
    text = json.dumps({"finish": ["stop"] * N, "metrics": [{"turns": 1.0}] * N})
    begin = data.rindex(b'{"finish"')
    assert data[begin:] == text.encode()
    other = json.dumps({"finish": ["stop"] * N, "metrics": [{"turns": 1.0}] * N} | changes).encode()
    return data[:8] + len(other).to_bytes(4, "little") + data[12:begin] + other


WRONG = {
    "a logprob above 0": (changed("logprobs", 3.25, 0), r"member 1, step 0.logprobs\[0\] is 3.25: a logprob is at most 0"),
    "a logprob that is no number": (changed("logprobs", np.nan, 2), r"member 1, step 0.logprobs\[2\] is nan"),
    "a logprob without end": (changed("logprobs", -np.inf, 1), r"member 1, step 0.logprobs\[1\] is -inf"),
    "an advantage beyond 32 bits": (
        changed("advantages", np.array([0, 3e38, 0, 0], np.float32)), r"member 1, step 0.advantages\[1\] is 3.0*\d*e\+38",
    ),
    "a token below 0": (changed("response", -5, 3), r"member 1, step 0.response\[3\]: token id -5 is outside"),
    "a token of another vocabulary": (changed("prompt", 100, 1), r"member 1, step 0.prompt\[1\]: token id 100 is outside .* of 100"),
    "a version that never was": (changed("versions", 2**31 - 1, 1), "version 2147483647, but the newest possible is 4"),
    "a version below any": (changed("versions", -7, 1), "policy version -7, but versions start at 0"),
    "a reward that is no number": (changed("reward", float("nan")), "member 1, step 0.reward is nan"),
    "a reward without bound": (changed("reward", 1e308), r"member 1, step 0.reward is 1e\+308"),
    "a mask of 7": (with_mask_byte(7), r"member 1, step 0.trained\[1\] is 7: a mask is 0 or 1"),
    "a row without a reply": (message([good(0), empty(1), good(2)]), "a row without a prompt or without a reply"),
    "a finish of a megabyte": (packed_with(finish=["stop", "x" * 10**5, "stop"]), "member 1, step 0.finish has 100000 characters"),
    "a finish that is no text": (packed_with(finish=["stop", 10**400, "stop"]), "finish is a whole number of .* bits: must be text"),
    "a metric of the run's own": (packed_with(metrics=[{}, {"reward": 1.0}, {}]), "a metric is called 'reward'"),
    "a metric that is text": (packed_with(metrics=[{}, {"turns": "1"}, {}]), r"member 1, step 0.metrics\['turns'\] is '1'"),
    "metrics that are none": (packed_with(metrics=[{}, [1], {}]), "member 1, step 0.metrics is a list: must be a mapping"),
    "fewer metrics than rows": (packed_with(metrics=[{"turns": 1.0}]), "malformed rows: 3 rows need as many"),
    "turn rewards that are none": (packed_with(turns=[None, [[1], ["1"]], None]), "member 1, step 0.turns are not turn rewards"),
    "turn rewards of more tokens": (packed_with(turns=[None, [[1, 99], [1, 1]], None]), "turns end at token 99, but the response has 4"),
    "a turn reward without bound": (packed_with(turns=[None, [[1], [1e300]], None]), r"member 1, step 0.turns is 1e\+300"),
    "fewer turn rewards than rows": (packed_with(turns=[None]), "malformed rows: 3 rows need as many"),
    "no JSON": (message([good(0)])[:-2] + b"]]", "malformed rows"),
}  # fmt: skip


async def answered(folder, messages: list[bytes], *, attempts: int):
    """Return what a source makes of a worker that answers each group with one of `messages`."""
    options = {"source": "rings", "rings": folder, "attempts": attempts, "deadline_s": 20.0, "max_staleness": 4}
    source = RingGroups(SkyRLOptions.model_validate(options), vocabulary=VOCABULARY)
    await source.open()
    await source.set_version(NEWEST)
    connecting = asyncio.to_thread(WorkClient.connect, folder, 1)
    client = await connecting

    def work() -> None:
        for data in messages:
            [job] = client.take(20.0)
            client.send(job, [data])
            client.done(job)

    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        [arrived] = await source.fetch([GroupRequest(Draw(1, "none", "train", 0, 1), N, True)], PARAMS, step_wise=False)
        return arrived
    finally:
        await working
        client.close()
        await source.close()


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_row_that_must_not_be_trained_is_refused_by_its_field_and_value(tmp_path, wrong):
    data, cause = WRONG[wrong]
    with pytest.raises(RolloutsFailed, match=rf"failed 1 times; the last time in (.|\n)*({cause})"):
        await answered(tmp_path / "rings", [data], attempts=1)


async def test_what_is_refused_is_reported_and_requested_again_and_training_goes_on(tmp_path, capsys):
    fine = message([good(member) for member in range(N)])
    arrived = await answered(tmp_path / "rings", [WRONG["a mask of 7"][0], WRONG["no JSON"][0], fine], attempts=3)
    assert [rows[0].response.tolist() for rows in arrived.trajectories] == [[7, 8, 9, member] for member in range(N)]
    assert arrived.requeued == 2
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("is refused") == 2


async def test_several_rows_of_one_member_are_no_group_of_whole_trajectories(tmp_path):
    rows = [
        (good(0)._replace(last=False), RowPosition(0, 0)),
        *((good(at), RowPosition(at, at == 0)) for at in range(N)),
    ]
    with pytest.raises(RolloutsFailed, match="member 0 of a group of 3 came with more rows"):
        await answered(tmp_path / "rings", [packed(rows)], attempts=1)


async def test_what_the_schema_allows_arrives_as_it_was_sent(tmp_path):
    """A token that is not trained may have any logprob and an unknown version."""
    row = good(1)
    odd = row._replace(logprobs=np.array([-1, 0.0005, 88.0, -9999.0], np.float32), reward=-1e9, finish="eos")
    arrived = await answered(tmp_path / "rings", [message([good(0), odd, good(2)])], attempts=1)
    [found] = arrived.trajectories[1]
    assert found.logprobs.tolist() == odd.logprobs.tolist() and (found.reward, found.finish) == (-1e9, "eos")
