"""Digests of tasks: they notice every change, name the first, and take no more room than their bound."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from atropos_core.rollouts.task_digests import MOST_BLOCKS, changes, digest_of, digests_of
from atropos_core.types import Task
from atropos_env_kit.numbered_tasks import NumberedTasks


def tasks(count: int) -> list[Task]:
    return [Task(f"t{n}", ({"role": "user", "content": str(n)},), str(n), {"n": n}) for n in range(count)]


@pytest.mark.parametrize(
    "change",
    [
        {"id": "x"},
        {"answer": "x"},
        {"answer": None},
        {"messages": ({"role": "user", "content": "x"},)},
        {"messages": ({"role": "system", "content": "7"},)},
        {"data": {"n": 8}},
        {"data": {"n": "7"}},
        {"data": {"n": {"deeper": [1]}}},
    ],
)
async def test_a_change_of_one_task_is_noticed_and_named(change: dict[str, Any]) -> None:
    before = tasks(20)
    after = [*before[:7], replace(before[7], **change), *before[8:]]
    found = await changes(await digests_of(before) or {}, after)
    assert found == f"1 of 20 are others: the first is number 8, with the id {after[7].id!r}"
    assert await digest_of(before) != await digest_of(after)
    assert await digest_of(before, 7) == await digest_of(after, 7)


async def test_the_same_tasks_are_the_same_whatever_the_order_of_keys_and_after_a_checkpoint() -> None:
    one = Task("1", (), None, {"a": 1, "b": 2, "of_no_json": object()})
    other = Task("1", (), None, {"of_no_json": object(), "b": 2, "a": 1})
    had = json.loads(json.dumps(await digests_of([one])))
    assert await changes(had, [other]) == ""
    assert await changes(had, (other,)) == ""


@pytest.mark.parametrize("count", [10, 3 * MOST_BLOCKS + 1])
async def test_tasks_that_come_or_go_at_the_end_leave_the_others_as_they_are(count: int) -> None:
    before = tasks(count)
    had = await digests_of(before) or {}
    assert (
        await changes(had, before) == await changes(had, before[:-3]) == await changes(had, [*before, *tasks(5)]) == ""
    )
    assert await changes(had, before[1:]) != ""


async def test_of_many_tasks_blocks_are_kept_and_a_change_in_any_is_noticed() -> None:
    before = tasks(3 * MOST_BLOCKS + 1)
    had = await digests_of(before) or {}
    assert len(had["blocks"]) <= 8 * MOST_BLOCKS
    for at in (0, 5000, len(before) - 1):
        after = [*before[:at], Task("x", ()), *before[at + 1 :]]
        first = at - at % had["block"] + 1
        assert (await changes(had, after)).startswith(
            f"at least 1 of {len(before):,} are others: the first is one of the numbers {first:,}"
        )


async def test_tasks_that_are_made_as_they_are_read_are_not_read() -> None:
    def make(number: int) -> Task:
        raise AssertionError("read")

    lazy = NumberedTasks(1 << 40, make)
    assert await digests_of(lazy) is None
    assert await digest_of(lazy) == await digest_of(lazy, 3) == ""
    assert await changes((await digests_of(tasks(3))) or {}, lazy) == ""


async def test_keys_that_cannot_be_sorted_leave_the_prompt_to_be_compared() -> None:
    odd = Task("1", ({"role": "user", "content": "a"},), None, {1: 1, "a": 2})
    had = await digests_of([odd]) or {}
    assert await changes(had, [odd]) == ""
    assert await changes(had, [replace(odd, messages=())]) != ""
