"""Checkpoints: whole or not at all, whatever happens while one is written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atropos_core.errors import CheckpointError, ProcessDied, RemoteError
from atropos_core.storage.checkpoint import OLDEST_AGE, Checkpoints, kept_steps, most_kept, seconds_between
from tests.disks import mounted
from tests.unit.disk import watch_disk

Write = Callable[[Path], Awaitable[None]]


def writes(text: str) -> Write:
    async def write(directory: Path) -> None:
        assert list(directory.iterdir()) == [], "the trainer gets an empty directory"
        (directory / "weights").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "optimizer").write_text(text * 2)

    return write


def breaks(error: BaseException) -> Write:
    async def write(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise error

    return write


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def no_warning(text: str) -> None:
    raise AssertionError(text)


async def saved(directory: Path, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep)
    for step in steps:
        await checkpoints.save(step, {"at": step}, writes(f"step {step}"))
    return checkpoints


async def test_what_was_saved_is_found_again_with_its_state(tmp_path):
    state = {"progress": {"step": 3, "first": {}}, "float": 0.1 + 0.2, "none": None, "list": [1, [2]]}
    made = await Checkpoints(tmp_path).save(3, state, writes("hello"))
    found = Checkpoints(tmp_path).latest(no_warning)
    assert found is not None
    assert (found.step, found.state, found.directory) == (3, state, tmp_path / "step-000003") == (
        made.step, made.state, made.directory,
    )  # fmt: skip
    assert (found.policy / "weights").read_text() == "hello"
    assert (found.policy / "sub" / "optimizer").read_text() == "hellohello"
    assert names(tmp_path) == ["step-000003"]


def test_a_run_that_saved_nothing_has_no_latest(tmp_path):
    assert Checkpoints(tmp_path).latest(no_warning) is None


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
async def test_the_last_few_stay(tmp_path, keep, left):
    await saved(tmp_path, 1, 2, 3, 4, keep=keep)
    assert names(tmp_path) == [f"step-{step:06d}" for step in left]


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_a_run_that_may_roll_back_keeps_a_checkpoint_from_before_any_step_that_a_finding_may_name(keep):
    most = most_kept(keep, None, 10**6)
    for seed in range(10):
        chance = random.Random(seed)
        longest = chance.choice([1, 2, 3, 10, 40])  # steps between two checkpoints
        step, every, kept = 0, [], []
        for _ in range(200):
            step += chance.randint(1, longest)
            every.append(step)
            kept = kept_steps([*kept, step], keep)
            assert kept[-keep:] == every[-keep:]
            assert len(kept) <= most
            for began in range(1, OLDEST_AGE, 9):
                clean = [step - one for one in every if step - one > began]
                there = [step - one for one in kept if step - one > began]
                if clean:
                    assert there, f"seed {seed}, step {step}: nothing is left from {began} steps ago or before"
                    assert min(there) <= max(4 * min(clean), OLDEST_AGE + longest)


def test_how_many_checkpoints_a_rollback_needs_follows_from_how_often_one_is_saved():
    assert [most_kept(2, every, 5000) for every in (None, 1, 5, 10, 50, 200)] == [9, 9, 7, 6, 4, 3]
    assert most_kept(2, 1, 3) == 3
    assert kept_steps([*range(1, 11)], 2) == [1, 6, 9, 10]


async def test_checkpoints_after_a_step_are_set_aside_also_in_a_second_attempt(tmp_path):
    checkpoints = await saved(tmp_path, 1, 2, 3, 4)
    for _ in range(2):
        checkpoints.set_aside_after(2, 1)
        assert names(tmp_path) == ["rolled-back-1-step-000004", "step-000001", "step-000002"]
        found = checkpoints.latest(no_warning)
        assert found is not None and found.step == 2


async def test_the_newest_is_the_one_with_the_most_steps_also_past_six_digits(tmp_path):
    checkpoints = await saved(tmp_path, 999_999, 1_000_000, keep=1)
    assert names(tmp_path) == ["step-1000000"]
    found = checkpoints.latest(no_warning)
    assert found is not None
    assert found.step == 1_000_000


async def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = await saved(tmp_path, 1)
    await checkpoints.save(1, {"at": "again"}, writes("new"))
    found = checkpoints.latest(no_warning)
    assert found is not None
    assert found.state == {"at": "again"}
    assert (found.policy / "weights").read_text() == "new"


# -- damage


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "a flipped bit": lambda at: _flip(at / "policy/weights"),
    "a file cut short": lambda at: os.truncate(at / "policy/sub/optimizer", 3),
    "a file that is gone": lambda at: (at / "policy/weights").unlink(),
    "no manifest": lambda at: (at / "manifest.json").unlink(),
    "half a manifest": lambda at: os.truncate(at / "manifest.json", 20),
    "an empty manifest": lambda at: os.truncate(at / "manifest.json", 0),
    "a manifest of something else": lambda at: (at / "manifest.json").write_text("[1, 2]"),
    "a manifest without its files": lambda at: (at / "manifest.json").write_text('{"format": 1, "step": 2}'),
    "a manifest whose files are a list": lambda at: (at / "manifest.json").write_text(
        '{"format": 1, "step": 2, "state": {}, "files": []}'
    ),
    "a step that was changed by hand": lambda at: (at / "manifest.json").write_text(
        (at / "manifest.json").read_text().replace('"step": 2', '"step": 7')
    ),
    "a newer format": lambda at: (at / "manifest.json").write_text('{"format": 2}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, damage):
    checkpoints = await saved(tmp_path, 1, 2)
    damage(tmp_path / "step-000002")
    warnings: list[str] = []
    found = checkpoints.latest(warnings.append)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step-000002" in warnings[0]
    assert "It is passed over." in warnings[0]


async def test_when_all_are_damaged_the_run_does_not_quietly_start_again(tmp_path):
    checkpoints = await saved(tmp_path, 1, 2)
    for step in (1, 2):
        _flip(tmp_path / f"step-00000{step}/policy/weights")
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints .* is whole"):
        checkpoints.latest(warnings.append)
    assert len(warnings) == 2
    assert not any("one before" in warning for warning in warnings), "there is none"


@pytest.mark.parametrize("keep", [1, 2])
async def test_a_damaged_later_checkpoint_never_costs_the_one_just_saved(tmp_path, keep):
    checkpoints = await saved(tmp_path, 2, 4, 8)
    for step in (4, 8):
        _flip(tmp_path / f"step-00000{step}/policy/weights")
    assert checkpoints.latest(lambda text: None).step == 2  # type: ignore[union-attr] # the run resumes from there
    await Checkpoints(tmp_path, keep).save(3, {"at": 3}, writes("step 3"))
    found = checkpoints.latest(lambda text: None)
    assert found is not None
    assert found.step == 3


# -- failures while saving


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), CheckpointError),
        (RemoteError("trainer raised OSError: [Errno 28]"), CheckpointError),
        (ProcessDied("the trainer is gone"), ProcessDied),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
async def test_a_save_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, error, raised):
    checkpoints = await saved(tmp_path, 1)
    with pytest.raises(raised) as caught:
        await checkpoints.save(2, {}, breaks(error))
    assert names(tmp_path) == ["step-000001"]
    found = checkpoints.latest(no_warning)
    assert found is not None
    assert found.step == 1
    if raised is CheckpointError:
        assert "step-000002 cannot be written" in str(caught.value)
        assert "atropos resume" in str(caught.value)


async def test_a_full_disk_is_said_without_the_trace_of_a_library(tmp_path):
    with (
        mounted(tmp_path / "disk", "512k") as disk,
        pytest.raises(CheckpointError, match=r"step-000001 cannot be written: the disk is full\.\n") as caught,
    ):
        await Checkpoints(disk).save(1, {}, breaks(RemoteError("RuntimeError: [enforce fail]\nTraceback")))
    assert "Traceback" not in str(caught.value)


async def test_a_state_that_is_not_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        await Checkpoints(tmp_path).save(1, {"set": {1}}, writes("x"))
    assert names(tmp_path) == []


async def test_a_failed_second_save_of_a_step_keeps_the_first(tmp_path):
    checkpoints = await saved(tmp_path, 1)
    with pytest.raises(CheckpointError):
        await checkpoints.save(1, {}, breaks(OSError("no")))
    found = checkpoints.latest(no_warning)
    assert found is not None
    assert found.state == {"at": 1}


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from atropos_core.storage.checkpoint import Checkpoints

async def write(directory):
    (directory / "weights").write_text("half")
    if sys.argv[2] == "in write":
        os.kill(os.getpid(), signal.SIGKILL)

real = Path.rename
def rename(self, target):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "before rename":
    Path.rename = rename  # the moment before the directory would appear
asyncio.run(Checkpoints(Path(sys.argv[1])).save(2, {}, write))
"""


@pytest.mark.parametrize("moment", ["in write", "before rename"])
async def test_kill_9_while_saving_leaves_the_one_before_and_its_rubbish_is_swept(tmp_path, moment):
    checkpoints = await saved(tmp_path, 1)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".step-000002.partial", "step-000001"]
    found = checkpoints.latest(no_warning)
    assert found is not None
    assert found.step == 1
    checkpoints.sweep()
    assert names(tmp_path) == ["step-000001"]


async def test_rubbish_of_a_killed_save_does_not_get_into_the_next_one(tmp_path):
    rubbish = tmp_path / ".step-000001.partial" / "policy"
    rubbish.mkdir(parents=True)
    (rubbish / "old").write_text("x")
    await saved(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-000001/manifest.json").read_text())
    assert sorted(manifest["files"]) == ["policy/sub/optimizer", "policy/weights"]
    assert names(tmp_path) == ["step-000001"]


async def test_all_of_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_it_counts(tmp_path, monkeypatch):
    calls = watch_disk(monkeypatch)
    made = await Checkpoints(tmp_path).save(3, {"at": 3}, writes("hello"))
    named = calls.index(("rename", made.directory, 0))
    partial = tmp_path / ".step-000003.partial"
    before = {path.relative_to(partial): size for what, path, size in calls[:named] if what == "sync"}
    for path in made.directory.rglob("*"):
        if path.is_file():
            assert before[path.relative_to(made.directory)] == path.stat().st_size, "synced once all was written"
    assert {Path(), Path("policy")} <= before.keys(), "and the lists of names"
    assert [path for what, path, _ in calls[named + 1 :] if what == "sync"] == [tmp_path]


def test_checkpoints_whose_interval_is_not_set_take_a_twentieth_of_the_time_at_most():
    assert [seconds_between(took) for took in (0.0, 0.1, 0.5)] == [10.0] * 3
    for took in (1.0, 112.0):
        assert took / (took + seconds_between(took)) == pytest.approx(0.05)


def test_a_step_that_no_file_can_have_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint of step {10**300} in"):
        Checkpoints(tmp_path).at(10**300)
