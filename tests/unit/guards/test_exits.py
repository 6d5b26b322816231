"""What would end a process is an error of the component that asked for it, and nothing else is."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from atropos_core.errors import EndsProcess
from atropos_core.guards.exits import contain_tasks, contained


def test_only_what_ends_a_process_becomes_an_error():
    for error in (ValueError("x"), asyncio.CancelledError()):
        with pytest.raises(type(error)), contained("mine"):
            raise error
    with pytest.raises(KeyboardInterrupt), contained("mine", passing=(KeyboardInterrupt,)):
        raise KeyboardInterrupt
    with pytest.raises(EndsProcess, match=r"mine raised SystemExit\(3\) in test_exits.py:"), contained("mine"):
        raise SystemExit(3)


def test_a_task_that_a_component_starts_for_itself_ends_no_loop():
    async def ends() -> None:
        raise SystemExit(3)

    async def main() -> None:
        contain_tasks(asyncio.get_running_loop())
        with pytest.raises(EndsProcess, match=r"ends\(\) raised SystemExit"):
            await asyncio.create_task(ends())

    asyncio.run(main())


def test_a_task_that_is_cancelled_before_it_began_leaves_no_coroutine_that_nobody_awaited():
    async def never() -> None:
        raise AssertionError("it was cancelled before")

    async def main() -> None:
        contain_tasks(asyncio.get_running_loop())
        task = asyncio.create_task(never())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not [one for one in warned if "never awaited" in str(one.message)]
