"""When calls to a server are given up."""

from __future__ import annotations

import asyncio

import pytest

from atropos_core.errors import ProcessSilent
from atropos_core.guards.patience import Patience
from atropos_server_watch.watch import ServerWatch
from tests.unit import virtual_time


def test_calls_are_given_up_together_if_none_is_answered_and_not_if_one_is(capfd):
    async def main():
        watch = ServerWatch("the server", Patience(say_s=0.2, least_s=0.6, times=1.0), needed=True)

        async def call(kind: str, seconds: float) -> None:
            async with watch.call(kind):
                await asyncio.sleep(seconds)

        short = [0.15] * 12
        long = asyncio.create_task(call("long", 1.5))
        for seconds in short:  # 1.8 s of answers: the long call does not count as silence
            await call("short", seconds)
        await long
        assert capfd.readouterr().err == ""
        silent = [asyncio.create_task(call("short", 60)) for _ in range(3)]
        for ended in await asyncio.gather(*silent, return_exceptions=True):
            assert isinstance(ended, ProcessSilent) and "the server gave no answer to short for" in str(ended)
        assert "the server has given no answer to short for" in capfd.readouterr().err
        watch.excused = {"short"}
        await call("short", 1.0)
        assert capfd.readouterr().err == ""
        with pytest.raises(TimeoutError, match="its own"):
            async with watch.call("short"):
                raise TimeoutError("its own")

    virtual_time.run(main())
