"""The records of a run, written by the sink and read again."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from atropos_core.builtin.config import JsonlOptions
from atropos_core.builtin.sinks import JsonlSink
from atropos_core.errors import DataError, RunDirectoryError
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.training.batch import to_batch
from atropos_core.types import TopK
from atropos_records.rollout_records import RolloutRecords
from atropos_testing.samples import make_group
from tests.disks import mounted


def a_run(folder: Path, **options: object) -> tuple[Path, JsonlSink]:
    (folder / "config.toml").write_text("[training]\nsteps = 3\n[sink.jsonl]\n")
    return folder, JsonlSink(JsonlOptions.model_validate(options), folder)


def a_record(step: int) -> StepRecord:
    """Two trained groups in another order than the batch had them, a flat one that a transform left out, and a stale one."""
    first, second = (make_group(n, [0, 1, 2]).with_advantages(np.array([-1, 0, 1])) for n in (0, 1))
    flat, stale = make_group(2, [1, 1], failed=1), make_group(3, [0, 1])
    batch = to_batch([second, first], step)
    size = int(np.diff(to_batch([second], step).offsets).sum())
    values = {
        "advantages": 10 * batch.advantages,
        "trainer_logprobs": np.where(batch.sampled, np.arange(len(batch.tokens)), np.nan).astype(np.float32),
    }
    settled = [
        SettledGroup(first, "trained", batch_start=size),
        SettledGroup(flat, "flat", "transform.drop_flat"),
        SettledGroup(second, "trained", batch_start=0),
        SettledGroup(stale, "stale", "training.max_staleness"),
    ]
    return StepRecord(step, {"loss": 0.5, "odd": math.inf}, [first, flat, second], settled, values)


async def write(sink: JsonlSink, *steps: int) -> None:
    await sink.open()
    for step in steps:
        await sink.record(a_record(step))
    await sink.close()


async def test_what_was_recorded_is_read_again(tmp_path):
    run, sink = a_run(tmp_path)
    await write(sink, 1, 2)
    records = RolloutRecords(run)
    assert records.steps() == records.steps_with_tokens() == [1, 2]
    table = records.metrics()
    assert table.steps.tolist() == [1, 2]
    assert table.columns["loss"].tolist() == [0.5, 0.5]
    assert np.isnan(table.columns["odd"]).all()
    step, wrote = records.step(2), a_record(2)
    episodes = step.episodes
    assert [(one.draw, one.outcome, one.dropped_by) for one in episodes] == (
        [(0, "trained", "")] * 3
        + [(2, "flat", "transform.drop_flat")] * 3
        + [(1, "trained", "")] * 3
        + [(3, "stale", "training.max_staleness")] * 2
    )
    assert [one.failed for one in episodes].count("a rollout that failed") == 1
    expected = [(of, episode) for of in wrote.settled for episode in of.group.episodes]
    ended = [one for one in episodes if not one.failed]
    assert len(ended) == len(expected)
    for one, (of, episode) in zip(ended, expected, strict=True):
        (tokens,) = step.sequences(one)
        (rollout,) = episode.rollouts
        assert tokens.episode == one.line
        assert tokens.ids.tolist() == rollout.tokens.tolist()
        assert tokens.sampled.tolist() == rollout.sampled.tolist()
        assert tokens.logprobs[rollout.sampled].tolist() == rollout.logprobs[rollout.sampled].tolist()
        assert np.isnan(tokens.logprobs[~rollout.sampled]).all()
        assert (tokens.versions == np.where(rollout.sampled, 0, -1)).all()
        assert tokens.trained.any() == (of.outcome == "trained")
        (span,) = step.reply_spans(one)
        assert one.messages[span.message]["role"] == "assistant"
        assert rollout.sampled[span.start : span.end].all()
        assert span.end - span.start == one.sampled_tokens == rollout.sampled.sum()


async def test_values_of_the_trainer_are_those_of_the_same_tokens(tmp_path):
    run, sink = a_run(tmp_path)
    await write(sink, 1)
    step = RolloutRecords(run).step(1)
    batch_order = [one for draw in (1, 0) for one in step.episodes if one.draw == draw]
    tokens = [step.sequences(one)[0] for one in batch_order]
    trainers = np.concatenate([one.trainer_logprobs for one in tokens])
    sampled = np.concatenate([one.sampled for one in tokens])
    assert trainers[sampled].tolist() == np.flatnonzero(sampled).tolist()
    for one, of in zip(batch_order, tokens, strict=True):
        assert set(of.advantages[of.trained]) == {10 * one.advantage}
        assert np.isnan(of.advantages[~of.trained]).all()
    (dropped,) = step.sequences(next(one for one in step.episodes if one.outcome == "flat"))
    assert np.isnan(dropped.trainer_logprobs).all(), "nobody scored it"
    assert dropped.entropy is None, "this trainer gave none"


async def test_where_messages_are_not_the_replies_nobody_guesses_which_tokens_they_are(tmp_path):
    run, sink = a_run(tmp_path)
    group = make_group(0, [1.0])
    said = {"role": "assistant", "content": "that an agent put into its own history"}
    more = replace(group, episodes=(replace(group.episodes[0], messages=(said, *group.episodes[0].messages)),))
    await sink.open()
    await sink.record(StepRecord(1, {}, [more], [SettledGroup(more, "dropped")]))
    await sink.close()
    step = RolloutRecords(run).step(1)
    assert len(step.sequences(step.episodes[0])) == 1
    assert step.reply_spans(step.episodes[0]) == []


async def test_a_teacher_speaks_of_the_tokens_that_it_names(tmp_path):
    group = make_group(0, [1.0])
    (rollout,) = group.episodes[0].rollouts
    length, last = len(rollout.tokens), int(rollout.tokens[-1])
    ids = np.array([last + 1, last, 7], np.int32)
    teacher = TopK(np.array([0] * length + [3]), ids, np.array([-3, -2, -1], np.float32))
    taught = replace(group, episodes=(replace(group.episodes[0], rollouts=(replace(rollout, teacher=teacher),)),))
    run, sink = a_run(tmp_path)
    await sink.open()
    await sink.record(StepRecord(1, {}, [taught], [SettledGroup(taught, "dropped")]))
    await sink.close()
    step = RolloutRecords(run).step(1)
    (tokens,) = step.sequences(step.episodes[0])
    assert tokens.teacher_logprobs[-1] == -2
    assert np.isnan(tokens.teacher_logprobs[:-1]).all()


async def test_the_oldest_tokens_make_room_and_the_texts_stay(tmp_path, capsys):
    run, sink = a_run(tmp_path, tokens_max_mb=0.03)
    await write(sink, *range(1, 9))
    records = RolloutRecords(run)
    kept = records.steps_with_tokens()
    assert records.steps() == list(range(1, 9))
    assert kept == list(range(kept[0], 9)) and 1 < kept[0] < 8
    assert sum(records.step(step).tokens_path.stat().st_size for step in kept) <= 30_000
    assert records.step(1).tokens is None
    assert "tokens_max_mb" in records.step(1).why_no_tokens
    assert capsys.readouterr().out.count("tokens_max_mb") == 1, "said once"


async def test_without_tokens_the_reader_says_so(tmp_path):
    run, sink = a_run(tmp_path, tokens=False)
    assert not sink.wants_token_values(1)
    await write(sink, 1)
    (run / "config.toml").write_text("[sink.jsonl]\ntokens = false\n")
    step = RolloutRecords(run).step(1)
    assert step.tokens is None and step.sequences(step.episodes[0]) == []
    assert step.why_no_tokens == "the run does not record tokens: sink.jsonl.tokens is false"


async def test_a_resumed_run_removes_what_came_after_its_checkpoint(tmp_path):
    run, sink = a_run(tmp_path)
    await sink.open()
    await sink.record(a_record(1))
    state = sink.state()
    await sink.record(a_record(2))
    await sink.close()
    again = JsonlSink(JsonlOptions(), run)
    again.load(state)
    await again.open()
    await again.close()
    records = RolloutRecords(run)
    assert records.steps() == records.steps_with_tokens() == records.metrics().steps.tolist() == [1]


@pytest.mark.parametrize("left_bytes", [0, 1, 24, 25, 26, 49])
async def test_metrics_cut_inside_a_line_lose_that_line_and_no_later_one(tmp_path, capsys, left_bytes):
    """A line of these is 25 bytes long."""
    run, sink = a_run(tmp_path)
    await sink.open()
    for step in (1, 2):
        await sink.step(step, {"loss": 0.5}, [])
    state = sink.state()
    await sink.close()
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes()[:left_bytes])
    (run / "rollouts/step-x.jsonl").write_text("the user's own")
    again = JsonlSink(JsonlOptions(), run)
    again.load(state)
    await again.open()
    await again.step(3, {"loss": 0.5}, [])
    await again.close()
    table = RolloutRecords(run).metrics()
    assert table.broken == 0 and table.steps.tolist() == [*range(1, left_bytes // 25 + 1), 3]
    assert "lines of steps before it are gone" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_an_earlier_version_is_read_as_far_as_it_goes(tmp_path):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "rollouts").mkdir()
    old = {"task": "a", "environment": "b", "draw": 1, "reward": 1.0, "advantage": None, "parts": {}, "correct": True,
           "finish": "stop", "tokens": 3, "messages": [{"role": "assistant", "content": "x"}]}  # fmt: skip
    (tmp_path / "rollouts/step-000004.jsonl").write_text(json.dumps(old) + "\n")
    step = RolloutRecords(tmp_path).step(4)
    (episode,) = step.episodes
    assert episode.outcome is None and episode.sequences == () and episode.reward == 1.0
    assert step.reply_spans(episode) == []
    assert "recorded no tokens" in step.why_no_tokens
    for other in (10**300, -1, 2**63):
        with pytest.raises(DataError, match=f"no rollouts of step {other}: 1 are, from 4 to 4"):
            RolloutRecords(tmp_path).step(other)
    with pytest.raises(DataError, match="no rollouts of step 5: 1 are, from 4 to 4"):
        RolloutRecords(tmp_path).step(5)
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RolloutRecords(tmp_path / "rollouts")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def long_header(path: Path) -> None:
    path.write_bytes((1 << 62).to_bytes(8, "little") + path.read_bytes()[8:])


def without_ids(path: Path) -> None:
    columns = load_file(path)
    del columns["ids"]
    save_file(columns, path, {"format": "1"})


def ids_as_floats(path: Path) -> None:
    columns = load_file(path)
    save_file(columns | {"ids": columns["ids"].astype(np.float32)}, path, {"format": "1"})


def offsets_that_fall(path: Path) -> None:
    columns = load_file(path)
    columns["sequence_offsets"][1] = 10**9
    save_file(columns, path, {"format": "1"})


def short_column(path: Path) -> None:
    columns = load_file(path)
    save_file(columns | {"logprobs": columns["logprobs"][:-1]}, path, {"format": "1"})


def another_format(path: Path) -> None:
    save_file(load_file(path), path, {"format": "2"})


@pytest.mark.parametrize(
    "damage",
    [cut_short, long_header, without_ids, ids_as_floats, offsets_that_fall, short_column, another_format],
)
async def test_a_damaged_file_of_tokens_is_one_error_that_names_it(tmp_path, damage):
    run, sink = a_run(tmp_path)
    await write(sink, 1)
    step = RolloutRecords(run).step(1)
    damage(step.tokens_path)
    with pytest.raises(DataError, match=r"step-000001\.safetensors is damaged"):
        step.tokens  # noqa: B018 - it is opened


GOOD = {"task": "a", "environment": "b", "draw": 1}


@pytest.mark.parametrize(
    "line",
    [
        '{"task": "a"', "[1]", '{"task": 1}', "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "[" * 100_000,
        *(json.dumps(GOOD | changed) for changed in (
            {"draw": "x"}, {"reward": 10**400}, {"reward": []}, {"parts": [1]}, {"messages": "hello"}, {"messages": [1]},
            {"outcome": 3}, {"correct": "yes"}, {"sequences": ["a"]}, {"versions": 3},
        )),
    ],
    ids=lambda line: line[:60],
)  # fmt: skip
async def test_a_damaged_line_is_one_error_that_names_it(tmp_path, line):
    run, sink = a_run(tmp_path)
    await write(sink, 1)
    path = RolloutRecords(run).rollouts_path(1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"step-000001\.jsonl is damaged: line 3: "):
        RolloutRecords(run).step(1).episodes  # noqa: B018 - it is read


async def test_a_full_disk_is_one_error_that_names_the_step_and_leaves_nothing_half_written(tmp_path):
    with mounted(tmp_path / "disk", "100k") as disk:
        run, sink = a_run(disk)
        await sink.open()
        with pytest.raises(RunDirectoryError, match=r"rollouts/step-\d+\.jsonl cannot be written: the disk is full"):
            for step in range(1, 100):
                await sink.record(a_record(step))
        await sink.close()
        records = RolloutRecords(run)
        assert not list((run / "rollouts").glob(".*"))
        for step in map(records.step, records.steps()):
            assert step.tokens is not None and step.sequences(step.episodes[0])


def test_lines_of_metrics_that_are_not_whole_are_counted(tmp_path):
    (tmp_path / "config.toml").write_text("")
    lines = ['{"step": 1, "a": 1}', '{"step": 2, "a": "x"}', '{"step": 3, "a": null, "b": 2}', '{"step": "x"}', "{", "[]",
             '{"step": 4, "a": 1' + "0" * 400 + "}"]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    table = RolloutRecords(tmp_path).metrics()
    assert table.broken == 5 and table.steps.tolist() == [1, 3]
    assert table.columns["a"][0] == 1 and np.isnan(table.columns["a"][1])
    assert np.isnan(table.columns["b"][0]) and table.columns["b"][1] == 2


async def test_sequences_that_the_file_of_tokens_has_not_are_one_error(tmp_path):
    run, sink = a_run(tmp_path)
    await write(sink, 1)
    path = RolloutRecords(run).rollouts_path(1)
    path.write_text(path.read_text().replace('"sequences": [0]', '"sequences": [99]'))
    step = RolloutRecords(run).step(1)
    with pytest.raises(DataError, match=r"line 1: .* no number 99"):
        step.sequences(step.episodes[0])


def test_options_without_effect_are_refused():
    for options in ({"rollouts_every": 0, "tokens": False}, {"tokens": False, "tokens_max_mb": 3}):
        with pytest.raises(ValueError, match="has no effect where"):
            JsonlOptions.model_validate(options)
    resumed = JsonlOptions(rollouts_every=0).model_dump()  # a config.toml names every option
    assert JsonlOptions.model_validate(resumed).rollouts_every == 0


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.mkdir()


def as_loop(path: Path) -> None:
    path.symlink_to(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


WAYS = {
    "a pipe": as_pipe, "a directory": as_directory, "a loop of links": as_loop, "a device": as_device, "empty": as_bytes(b""),
    "no text": as_bytes(b"\xff\xfe\x00" * 99), "deep": as_bytes(b"[" * 200_000), "long": as_bytes(b"x" * 3_000_000),
    "a list": as_bytes(b"[1]\n"), "other types": as_bytes(b'{"step": [], "check": 1, "state": {}, "since": null, "steps": "x"}\n'),
    "long numbers": as_bytes(b'{"step": 1%s, "since": 1%s, "check": "a", "state": "ok", "steps": 1%s}\n' % ((b"0" * 400,) * 3)),
    "not finite": as_bytes(b'{"step": NaN, "since": Infinity, "check": "a", "state": "ok", "steps": NaN}\n'),
}  # fmt: skip
FILES = ("config.toml", "metrics.jsonl", "health.jsonl", "summary.json", "lock", "rollouts/tools.jsonl", "rollouts/step-000001.jsonl",
         "rollouts/step-000001.safetensors", "rollouts/eval-000000.jsonl", "checkpoints", "rollouts")  # fmt: skip


@pytest.mark.parametrize("file", FILES)
async def test_a_damaged_file_is_one_error_or_left_out_and_nothing_waits(tmp_path, file):
    (tmp_path / "whole").mkdir()
    whole, sink = a_run(tmp_path / "whole")
    await write(sink, 1)
    for number, (way, damage) in enumerate(WAYS.items()):
        run = shutil.copytree(whole, tmp_path / str(number))
        if (run / file).is_dir():
            shutil.rmtree(run / file)
        else:
            (run / file).unlink(missing_ok=True)
        damage(run / file)
        for read in (
            lambda records: records.config,
            lambda records: records.metrics(),
            lambda records: (
                records.health(),
                records.summary,
                records.finished_steps,
                records.run.is_locked(),
                records.tools(),
            ),
            lambda records: (records.steps(), records.evaluation_steps(), records.checkpoint_steps()),
            lambda records: (
                records.step(1).why_no_tokens,
                [records.step(1).sequences(one) for one in records.step(1).episodes],
            ),
            lambda records: records.evaluation(0),
        ):
            try:
                read(RolloutRecords(run))
            except (DataError, RunDirectoryError) as error:
                assert str(run) in str(error), way
