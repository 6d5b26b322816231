"""A client that is killed while an answer is on its way to it."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from tests.agents.clients import CLIENTS
from tests.agents.conftest import DEADLINE_S, Made
from tests.agents.ledgers import sampled, trained
from tests.waiting import has_ended, until


@pytest.mark.parametrize("name", ["openai-chat", "anthropic", "codex"])
async def test_of_a_client_that_is_killed_in_a_stream_what_it_was_shown_is_trained_and_nothing_stays(
    name: str, made: Made
):
    async with made(CLIENTS[name], waits_in_turn=2, on_failure="grade") as trial:
        running = asyncio.create_task(trial.group(1))
        await asyncio.wait_for(trial.engine.is_waiting.wait(), DEADLINE_S)
        clients = client_processes()
        clients[-1].send_signal(signal.SIGKILL)
        [episode] = (await running).episodes
        trial.engine.go_on.set()
        assert trained(episode) == sampled(trial.engine.ledger[:1]) != []
        assert episode.score == 1.0  # of the file, which the tool had written
        assert episode.metrics["agent/programs_failed"] == 1
        await until(lambda: all(has_ended(one.pid) for one in clients), f"the end of {clients}")


def client_processes() -> list[psutil.Process]:
    """Those that were started for the task, each before what it started itself."""
    ours = psutil.Process().children(recursive=True)
    return [one for one in ours if any("product of 6 and 7" in word for word in one.cmdline())]
