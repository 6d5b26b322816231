"""Deadlines on what may never answer, and whose cancellation it was."""

from __future__ import annotations

import asyncio

import pytest

from atropos_core.errors import DeadlineExceeded, EndsProcess
from atropos_core.guards.deadlines import within


async def test_what_never_answers_is_named_at_its_deadline():
    with pytest.raises(DeadlineExceeded, match="the bell gave no answer within 0.01 s"):
        async with asyncio.timeout(30):
            await within(asyncio.Event().wait(), 0.01, "the bell")


async def test_a_timeout_of_its_own_is_no_deadline_of_ours():
    async def late() -> None:
        raise TimeoutError("the page")

    with pytest.raises(TimeoutError, match="the page"):
        await within(late(), 30, "the bell")


async def test_what_awaits_something_that_was_cancelled_has_failed_and_its_caller_goes_on():
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    with pytest.raises(RuntimeError, match="the bell awaited something that was cancelled"):
        await within(gone, 30, "the bell")


async def test_whoever_is_cancelled_meanwhile_is_cancelled():
    waiting = asyncio.ensure_future(within(asyncio.Event().wait(), 30, "the bell"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()])
async def test_what_would_end_the_process_is_an_error_of_that_name(ending: BaseException):
    async def ends() -> None:
        raise ending

    with pytest.raises(EndsProcess, match=rf"the bell raised {type(ending).__name__}.* in test_deadlines.py:"):
        await within(ends(), 30, "the bell")
