"""Scores come from what a program left, in a process that it cannot write to: files, functions, environments."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_agent_api.grading import Case, left_files
from atropos_agent_api.grading.case import read_score
from atropos_agent_api.grading.graders import EnvironmentGrader, FunctionGrader, PluginGrader
from atropos_agent_api.grading.left_files import LeftFiles, NotGradable, copy_left
from atropos_core.builtin.config import ExactOptions
from atropos_core.builtin.rewards import ExactReward
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, PluginError, RemoteError
from atropos_core.interfaces import Environment
from atropos_core.types import Episode, Message, Rollout, Score, Task, tokens
from tests.waiting import has_ended, until

GRADERS = Path(__file__).with_name("graders.py")
TASK = Task("1", ({"role": "user", "content": "two and two"},), answer="4", data={"level": 2})
SAID = ({"role": "user", "content": "two and two"}, {"role": "assistant", "content": "4"})


def case_in(work: Path, **changed: Any) -> Case:
    return replace(Case(TASK, SAID, "4", 0, "", work), **changed)


@asynccontextmanager
async def grader(
    name: str, folder: Path, deadline_s: float = 20.0, file: Path = GRADERS
) -> AsyncIterator[FunctionGrader]:
    made = FunctionGrader(f"{file}:{name}", folder / "grader.log", deadline_s)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


async def test_a_function_scores_what_was_left(tmp_path: Path) -> None:
    (tmp_path / "answer.txt").write_text("4\n")
    async with grader("file_is_right", tmp_path) as function:
        first = await function.score(case_in(tmp_path), Episode((), 0.0))
        (tmp_path / "answer.txt").write_text("5\n")
        second = await function.score(case_in(tmp_path), Episode((), 0.0))
    assert (first.value, first.correct, second.value, second.correct) == (1.0, True, 0.0, False)
    assert first.metrics["calls"] == second.metrics["calls"] == 1.0, "each call begins with the state of the import"
    assert first.metrics["imported"] != os.getpid()


async def test_a_grader_that_is_changed_on_disk_grades_as_it_did(tmp_path: Path) -> None:
    file = shutil.copy(GRADERS, tmp_path / "mine.py")
    (tmp_path / "answer.txt").write_text("5")
    async with grader("file_is_right", tmp_path, file=Path(file)) as function:
        Path(file).write_text("def file_is_right(case):\n    return 1.0\n")
        assert (await function.score(case_in(tmp_path), Episode((), 0.0))).value == 0.0


async def test_a_coroutine_is_awaited(tmp_path: Path) -> None:
    async with grader("as_a_coroutine", tmp_path) as function:
        assert await function.score(case_in(tmp_path), Episode((), 0.0)) == Score(1.0, True)
        assert await function.score(case_in(tmp_path, answer="5"), Episode((), 0.0)) == Score(0.0, False)


async def test_one_that_never_ends_is_ended_with_what_it_started_and_the_next_is_served(tmp_path: Path) -> None:
    async with grader("never_ends", tmp_path, 5.0) as function:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"never_ends gave no answer within 5 s"):
            await function.score(case_in(tmp_path), Episode((), 0.0))
        assert time.monotonic() - began < 40.0
        left = int((tmp_path / "pid").read_text())
        await until(lambda: has_ended(left), "what the grader started ends with it")
        with pytest.raises(DeadlineExceeded):
            await function.score(case_in(tmp_path), Episode((), 0.0))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("raises", RemoteError, "ValueError: there is no such thing"),
        ("ends_its_process", RemoteError, "ended its process without an answer"),
        ("gives_text", RemoteError, "gave '1.0', which is not a number"),
        ("gives_much", RemoteError, "returned more than 1,048,576 bytes"),
    ],
)
async def test_a_function_that_fails_is_named(tmp_path: Path, name: str, error: type[Exception], message: str) -> None:
    async with grader(name, tmp_path) as function:
        with pytest.raises(error, match=message):
            await function.score(case_in(tmp_path), Episode((), 0.0))


@pytest.mark.parametrize(
    ("reference", "message"),
    [("NO_FUNCTION", "is not a function"), ("file_is_rigth", "Did you mean 'file_is_right'"), ("x", "there is no 'x'")],
)
async def test_a_function_that_there_is_not_is_refused_when_it_is_opened(
    tmp_path: Path, reference: str, message: str
) -> None:
    with pytest.raises((ConfigError, PluginError, RemoteError), match=message):
        async with grader(reference, tmp_path):
            pass


async def test_an_installed_reward_reads_the_conversation(tmp_path: Path) -> None:
    exact = PluginGrader(ExactReward(ExactOptions()), "exact", 5.0)
    episode = Episode((), 0.0, messages=SAID)
    assert (await exact.score(case_in(tmp_path), episode)).value == 1.0
    assert (await exact.score(case_in(tmp_path), replace(episode, messages=SAID[:1]))).value == 0.0


class Sums(Environment):
    def tasks(self, split: Any) -> list[Task]:
        return [TASK]

    async def score(self, task: Task, reply: Message) -> Score:
        return Score(float(reply["content"] == task.answer), correct=reply["content"] == task.answer)


class Talks(Environment):
    def tasks(self, split: Any) -> list[Task]:
        return [TASK]


async def test_the_environment_of_the_tasks_scores_the_answer(tmp_path: Path) -> None:
    sums = EnvironmentGrader(Sums(), "sums")
    assert await sums.score(case_in(tmp_path), Episode((), 0.0)) == Score(1.0, True)
    assert (await sums.score(case_in(tmp_path, answer="four"), Episode((), 0.0))).value == 0.0
    with pytest.raises(ConfigError, match=r"cannot score a reply with score\(\)"):
        EnvironmentGrader(Talks(), "talks")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1", "not a number"), (None, "not a number"), ([1], "not a number"), ({}, "has no score"), ({"score": "1"}, "not a number"),
        ({"score": 1, "reward": 2}, r"has \['reward'\]"), ({"score": 1, "correct": 1}, "must be true, false or null"),
        ({"score": 1, "parts": [1]}, "not a mapping"), ({"score": 1, "metrics": {"a": "b"}}, "not a number"),
        ({"score": 1, "turns": 1.0}, "one number for each trained call"), ({"score": 1, "turns": ["b"]}, "not a number"),
    ],
)  # fmt: skip
def test_what_is_no_score_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_score(given, "the reward")


@pytest.mark.parametrize("given", [{"score": 1, "turns": [0.5, 0]}, Score(1.0, turns=[0.5, 0.0])])
def test_a_score_may_have_a_number_for_each_call(given: Any) -> None:
    assert read_score(given, "the reward") == Score(1.0, turns=[0.5, 0.0])


async def test_an_installed_reward_may_score_each_call(tmp_path: Path) -> None:
    async def each(task: Task, episodes: Any) -> list[Score]:
        return [Score(1.0, turns=[0.5, 0.0, 0.5])]  # calls, of which some may have no tokens

    sampled = np.ones(1, np.bool_)
    rollout = Rollout(tokens([1]), sampled, sampled, None, np.zeros(1, np.int32), 1.0)
    found = await PluginGrader(each, "each", 5.0).score(case_in(tmp_path), Episode((rollout,), 0.0, messages=SAID))
    assert (found.value, found.turns) == (1.0, [0.5, 0.0, 0.5])


def copied(work: Path, target: Path, most_bytes: int = 1_000_000, within_s: float = 60.0) -> LeftFiles:
    return copy_left(work, target, most_bytes, within_s)


def test_a_copy_has_files_and_inner_links_and_nothing_else(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "deep" / "er").mkdir(parents=True)
    (work / "deep" / "er" / "file").write_text("text")
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o4755)
    (tmp_path / "secret").write_text("another's")
    os.mkfifo(work / "pipe")
    for name, target in {
        "inner": "deep/er/file", "outer": str(tmp_path / "secret"), "up": "../secret", "root": "/", "gone": "nothing",
        "way": "deep/er", "through": "way/../../../secret",
    }.items():  # fmt: skip
        (work / name).symlink_to(target)
    found = copied(work, tmp_path / "copy")
    left = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert left == {"deep", "deep/er", "deep/er/file", "run.sh", "inner", "way"}
    assert (tmp_path / "copy" / "inner").read_text() == "text"
    assert (tmp_path / "copy" / "run.sh").stat().st_mode & 0o7777 == 0o700
    assert (found.files, found.size_bytes, found.left_out) == (2, 14, 6)


@pytest.mark.parametrize("swapped", [".", "deep", "deep/er"])
def test_a_folder_that_becomes_a_link_while_it_is_copied_is_left_out(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, secret = tmp_path / "work", tmp_path / "secret" / "er"
    for folder in (work / "deep" / "er", secret):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.parent.name)
    make_folder = left_files.Copy._make_folder

    def swap(copy: left_files.Copy, folder: str) -> None:
        make_folder(copy, folder)
        if os.path.normpath(folder) == swapped:
            (work / swapped).rename(tmp_path / "moved")
            (work / swapped).symlink_to(secret if swapped == "deep/er" else secret.parent)

    monkeypatch.setattr(left_files.Copy, "_make_folder", swap)
    assert copied(work, tmp_path / "copy").left_out == 1
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]


def chain(work: Path) -> None:
    (work / "0").write_text("end")
    for number in range(1, 3000):
        (work / str(number)).symlink_to(str(number - 1))


def crossed_chains(work: Path) -> None:
    """Each link of one chain leads through all of the one before."""
    for deep in range(60):
        (work / f"c{deep}_0").symlink_to("." if deep == 0 else f"c{deep - 1}_29")
        for number in range(1, 30):
            (work / f"c{deep}_{number}").symlink_to(f"c{deep}_{number - 1}/c{max(deep - 1, 0)}_{number}")


def loops(work: Path) -> None:
    (work / "self").symlink_to("self")
    (work / "a").symlink_to("b")
    (work / "b").symlink_to("a")
    (work / "up").symlink_to("up/up")


def odd_names(work: Path) -> None:
    for name in (b"\xff\xfe", b"new\nline", b"a" * 255, b"-rf", b"\xe2\x80\xae"):
        (Path(os.fsdecode(os.fsencode(work) + b"/" + name))).write_text("x")


@pytest.mark.parametrize("leave", [chain, crossed_chains, loops, odd_names])
def test_links_and_names_of_any_kind_are_copied_or_left_out_in_time(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    work.mkdir()
    leave(work)
    began = time.monotonic()
    found = copied(work, copy)
    assert time.monotonic() - began < 50.0
    assert found.left_out + len(os.listdir(copy)) == len(os.listdir(work))
    for path in copy.iterdir():
        assert path.resolve().is_relative_to(copy.resolve())
    assert found.left_out == {"chain": 2959, "loops": 4, "odd_names": 0}.get(leave.__name__, found.left_out)


def deep(work: Path) -> None:
    os.makedirs(work / "/".join(["d"] * 80))


def long_path(work: Path) -> None:
    os.makedirs(work / "/".join(["d" * 200] * 12))


def many(work: Path) -> None:
    for number in range(50):
        (work / str(number)).touch()


def sparse(work: Path) -> None:
    with (work / "holes").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("leave", "message"),
    [(deep, "64 folders"), (long_path, "2,048 bytes"), (many, "more than 40 files"), (sparse, "more than 1 MB")],
)
def test_more_than_a_reward_can_read_is_the_programs_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Path], None], message: str
) -> None:
    monkeypatch.setattr(left_files, "MOST_ENTRIES", 100 if leave is deep else 40)
    (work := tmp_path / "work").mkdir()
    leave(work)
    with pytest.raises(NotGradable, match=message):
        copied(work, tmp_path / "copy")


def test_copying_ends_at_its_deadline(tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    many(work)
    with pytest.raises(NotGradable, match="take too long"):
        copied(work, tmp_path / "copy", within_s=0.0)
