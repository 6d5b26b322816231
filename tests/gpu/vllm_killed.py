"""`kill -9` of one process of a trainer and a vLLM server: who names it, how soon, and what is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core.errors import AtroposError, ProcessDied
from atropos_core.types import Sampling
from tests.gpu.memory import Memory
from tests.gpu.report import Report

if TYPE_CHECKING:
    import psutil

    from tests.vllm.ends import Ends

NAMED_S = 10.0
CONTEXT_BYTES = 64e6  # what a device may still count some time after a process has ended
NAMES = {  # in the error
    "trainer": r"trainer \(pid \d+\) was killed by SIGKILL",
    "engine": r"engine \(pid \d+\) was killed by SIGKILL",
    "guard": r"the server's guard was killed by SIGKILL",
    "server": r"vLLM's server \(pid \d+\) was killed by SIGKILL",
    "core": r"vLLM's engine core \(pid \d+\) has ended",
    "worker": r"vLLM's worker \(pid \d+\) has ended",
}


@dataclass
class Killed:
    """The processes of trainer and engine before a kill, and the shared memory that they map."""

    victims: Sequence[str]
    by_name: dict[str, psutil.Process]
    everyone: list[psutil.Process]
    segments: set[str]
    scratch: Path  # vLLM's temporary directory

    @classmethod
    def found(cls, victims: Sequence[str]) -> Killed:
        import psutil

        from tests.vllm.processes import segments, vllm_processes

        own = psutil.Process()
        ends = {one.cmdline()[-1]: one for one in own.children() if one.cmdline()[-1:] in (["trainer"], ["engine"])}
        everyone = [process for end in ends.values() for process in (end, *end.children(recursive=True))]
        by_name = ends | vllm_processes(own)
        command = by_name["guard"].cmdline()
        scratch = Path(command[command.index("atropos_engine_vllm.guard") + 1])
        assert scratch.is_dir(), f"the guard's first argument is its temporary directory, and there is no {scratch}"
        return cls(victims, by_name, everyone, segments(everyone), scratch)

    async def kill(self, ends: Ends, report: Report) -> None:
        """One after another, each with a call in flight."""
        for victim in self.victims:
            process = self.by_name[victim]
            if victim == "worker" and process == self.by_name["core"]:
                report.note("worker killed", "NOT RUN: on one GPU it is in vLLM's core")
                continue
            call: asyncio.Task[Any] = asyncio.ensure_future(_trained(ends) if victim == "trainer" else _sampled(ends))
            await asyncio.sleep(0.1)
            report.holds(f"{victim} killed: a call was in flight", not call.done())
            process.send_signal(signal.SIGKILL)
            began = time.perf_counter()
            error = await _error(call)
            report.at_most(f"{victim} killed: seconds to the error", time.perf_counter() - began, NAMED_S, "s")
            good = isinstance(error, ProcessDied) and re.search(NAMES[victim], str(error)) is not None
            report.holds(f"{victim} killed: the message", good, _gist(str(error), NAMES[victim]))
            if victim == "trainer":
                made = await ends.sample(ends.prompts[0], Sampling(8))
                report.holds("trainer killed: the engine samples on", len(made[0].tokens) > 0)

    async def leave_nothing(self, report: Report) -> None:
        """Once what is left has been closed."""
        from tests.vllm.processes import left, still_running

        who = " and ".join(self.victims)
        running = await asyncio.to_thread(still_running, self.everyone, NAMED_S)
        report.holds(f"{who} killed: no process left", not running, _named(running) or "none")
        pids = {str(one.pid) for one in self.everyone}
        # Torch counts references in files named torch_PID_RANDOM_NUMBER.
        found = left(self.segments) | {name for name in os.listdir("/dev/shm") if pids & set(name.split("_"))}
        report.holds(f"{who} killed: nothing left in /dev/shm", not found, ", ".join(sorted(found)) or "nothing")
        report.holds(f"{who} killed: the temporary directory is gone", not self.scratch.exists())


async def comes_back(memory: Memory, before: int, report: Report) -> None:
    """The device's memory, within ten seconds."""
    until = time.monotonic() + NAMED_S
    while memory.used_bytes() > before + CONTEXT_BYTES and time.monotonic() < until:
        await asyncio.sleep(0.05)
    report.at_most("killed: memory of the device not given back", (memory.used_bytes() - before) / 1e6, 64, "MB")


async def _sampled(ends: Ends) -> object:
    """Replies that no token ends: they take longer than the process lives."""
    return await asyncio.gather(*(ends.sample(prompt, Sampling(400), 32) for prompt in ends.prompts))


async def _trained(ends: Ends) -> object:
    """Scores, again and again."""
    while True:
        await ends.parts.trainer.logprobs(ends.prompts * 64)


async def _error(call: asyncio.Task[Any]) -> AtroposError | None:
    try:
        await asyncio.wait_for(call, 2 * NAMED_S)
    except AtroposError as error:
        return error
    except TimeoutError:
        return None
    return None


def _named(processes: Sequence[psutil.Process]) -> str:
    named = []
    for process in processes:
        with process.oneshot():
            named.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}")
    return "; ".join(named)


def _gist(text: str, name: str) -> str:
    """The line that names it, else the first one."""
    lines = text.splitlines()
    return next((line.strip(" |") for line in lines if re.search(name, line)), lines[0])[:200]
