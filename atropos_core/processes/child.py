"""A component in a child process: how it is started, watched and ended.

This is the supervisor's side; `proxies.py` has the interfaces through which it is called, and `child_main.py` is the child's
side. A launcher starts the process: here (`local.py`), or on another machine.

A child writes to a log file. It ends when its supervisor does: because the connection closes, and by PR_SET_PDEATHSIG if the
kernel has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.console.waits import Wait, begin_wait, end_wait
from atropos_core.errors import AtroposError, ProcessDied, ProcessSilent
from atropos_core.guards.patience import DEFAULT_PATIENCE, LOOK_S, Patience, Seen, look_at
from atropos_core.launchers import Launcher, StartedProcess
from atropos_core.processes.local import LocalLauncher
from atropos_core.processes.rpc import Peer

START_DEADLINE_S = 300.0  # imports; building a component
OPEN_DEADLINE_S = 1800.0  # model loading and compilation; an engine that starts a server has a shorter one
CLOSE_DEADLINE_S = 10.0  # an engine ends its server within 6
ENDING_S = 1.0  # for it to end after a request, or after SIGTERM
STEP_DEADLINE_S = 3600.0
CALL_DEADLINE_S = 60.0
SAMPLES = frozenset({"sample", "logprobs", "top_logprobs"})  # what an engine leaves waiting while it is paused
ELSEWHERE = Seen((), 0.0, is_elsewhere=True)
LOG_LINES = 12  # of a dead child's log, in the error


class Child:
    """A child process with one component. Only this object ends it."""

    def __init__(
        self, role: str, process: StartedProcess, peer: Peer, log: Path, patience: Patience, *, needed: bool
    ) -> None:
        self.role = role
        self.process = process
        self.peer = peer
        self.log = log
        self._patience = patience
        self._needed = needed
        self.loads = "its model"  # when it is opened, for a line that says what is waited for
        self._waits: dict[int, Wait] = {}  # its own
        self.paused = False  # it samples nothing at present
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        role: str,
        build: Mapping[str, Any],
        log: Path,
        *,
        threads: int,
        environment: Mapping[str, str] | None = None,
        program: str = "atropos_core.processes.child_main",
        patience: Patience = DEFAULT_PATIENCE,
        needed: bool = False,
        launcher: Launcher | None = None,
    ) -> Child:
        """Start the process and have it build its component (for `build` see `atropos_core.processes.child_main`). `program` is the
        module to run, which ends in `atropos_core.processes.child_main.main`. `needed`: the run needs this process, and ends
        when it is given up; without it, calls have their own deadlines. `launcher` starts the process; None: on this machine."""
        process = await (launcher or LocalLauncher()).start(
            role,
            program,
            {
                "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE",  # a waiting role leaves its core to the working one
                "GOMP_SPINCOUNT": "1000",  # but within an operation, threads first wait for each other for about 50 µs without sleeping
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONUNBUFFERED": "1",
                **(environment or {}),
            },
            log,
        )
        child = cls.of(role, process, log, patience, needed=needed)
        try:
            await child.peer.call("build", dict(build), deadline_s=START_DEADLINE_S)
        except asyncio.CancelledError:
            await child.end()  # it imports, and would answer a request once it has: nothing is there to be closed
            raise
        except BaseException:
            await child.close()
            raise
        return child

    @classmethod
    def of(cls, role: str, process: StartedProcess, log: Path, patience: Patience, *, needed: bool = False) -> Child:
        """Wrap a process that has been started, and answers on its connection."""
        child = cls(role, process, None, log, patience, needed=needed)  # type: ignore[arg-type] # the peer needs the child to explain its end
        child.peer = Peer(
            process.connection, role, {"waits": child._waits_for}, on_lost=child._explain, state=child._state
        )
        child._watching = asyncio.create_task(child._watch())
        return child

    def _explain(self) -> AtroposError:
        """Return the error for a closed socket: the process has ended or is about to."""
        until = time.monotonic() + 2.0
        while (how := self.process.ended()) is None and time.monotonic() < until:
            time.sleep(0.005)
        if how is None:
            state = ", and its machine may be lost" if self.process.pid is None else " but still runs; it will be ended"
            return ProcessDied(f"{self._named} closed its connection{state}")
        return ProcessDied(f"{self._named} {how}.\n{tail_of_log(self.log)}".rstrip(), remedy=f"Its log is {self.log}")

    @property
    def _named(self) -> str:
        return f"{self.role} ({self.process.named})"

    def _look(self) -> Seen | None:
        """Look at the process; None if it has ended, or this kernel does not show processes."""
        return ELSEWHERE if self.process.pid is None else look_at(self.process.pid)

    async def _watch(self) -> None:
        """Warn of a long silence while calls are pending, and again each time it has doubled; give the process up at the limit."""
        loop, owed = asyncio.get_running_loop(), self.peer.owed
        warned_s, before, looked = 0.0, None, loop.time()
        while not self.peer.lost.is_set():
            await asyncio.sleep(min(LOOK_S, self._patience.say_s / 8))
            now = loop.time()
            owed.excuse(self._waits_for_us(), now)
            silent_s = owed.silent_s(now)
            if silent_s < warned_s:
                console.say(f"{self._named} answers again")
                warned_s = 0.0
            if silent_s < self._patience.say_s / 2:
                before = None
                continue
            seen = self._look()
            if seen is None:
                continue
            usual, stopped = owed.usual_s() or 0.0, bool(seen.stopped)
            bound_s = self._patience.least_s if stopped else owed.bound_s(self._patience)
            first_s = self._patience.say_s / 2 if stopped else max(self._patience.say_s, 2 * usual)
            if silent_s >= max(first_s, 2 * warned_s):
                warned_s = silent_s
                console.warn(
                    f"{self._named} has given no answer to {owed.last}() for {silent_s:.0f} s: "
                    f"{seen.says(before, now - looked)}.{self._wrote_within(silent_s)} {self._outlook(bound_s)}"
                )
            if self._needed and bound_s is not None and silent_s >= bound_s:
                self.peer.lose(self._given_up(silent_s, seen.says(before, now - looked), usual))
                await self.kill()
                return
            before, looked = seen, now

    async def _waits_for(self, number: int, what: str | None) -> None:
        """Called by the child when a `waiting` begins there, and with None when it ends."""
        if what is not None:
            self._waits[number] = begin_wait(f"{self.role}: {what}")
        elif (wait := self._waits.pop(number, None)) is not None:
            end_wait(wait)

    def _waits_for_us(self) -> Collection[str]:
        """Return the kinds of calls that it cannot answer before this process has done its part."""
        return (SAMPLES if self.paused else frozenset()) | ({"step"} if self.peer.is_called else set())

    def _wrote_within(self, seconds: float) -> str:
        """Return the last line of its log if that is recent: it may say what the process waits for."""
        try:
            is_new = time.time() - self.log.stat().st_mtime < seconds
        except OSError:
            return ""
        return f" Its log ends: {tail_of_log(self.log, 1).strip()}" if is_new else ""

    def _outlook(self, bound_s: float | None) -> str:
        if not self._needed:
            return "The call has its own deadline."
        if bound_s is None:
            return "It is the first call of its kind, so only its own deadline applies."
        return f"It is given up after {bound_s:.0f} s (watch.least_s, watch.times)."

    def _given_up(self, silent_s: float, state: str, usual_s: float) -> ProcessSilent:
        usual = f"; such calls took {usual_s:.1f} s at most before" if usual_s else ""
        return ProcessSilent(
            f"{self._named} gave no answer to {self.peer.owed.last}() for {silent_s:.0f} s{usual}. "
            f"When it was given up: {state}.\n{tail_of_log(self.log)}".rstrip(),
            remedy=f"Its log is {self.log}. Where it was only slow, raise watch.least_s or watch.times in the run file.",
        )

    def _state(self) -> str:
        """Return what a late answer's error should say about the process, if anything."""
        seen = self._look()
        return f": {seen.says(None, 0.0)}" if seen is not None and seen.stopped else ""

    async def close(self) -> None:
        """End the process: by a request, then by SIGTERM, then by SIGKILL to its process group."""
        if self.process.ended() is None and not self.peer.lost.is_set():
            try:
                await self.peer.call("close", deadline_s=CLOSE_DEADLINE_S)
            except AtroposError:
                pass  # it is ended below, however it answered
        self._hang_up()
        if not await self._ended(ENDING_S):
            await self.end()

    async def end(self) -> None:
        """End it without a request: by SIGTERM, then by SIGKILL."""
        self._hang_up()
        self.process.terminate()
        if not await self._ended(ENDING_S):
            await self.kill()

    async def kill(self) -> None:
        """End it at once, with everything that it started."""
        self._hang_up()
        self.process.kill()
        await self._ended(CLOSE_DEADLINE_S)

    def _hang_up(self) -> None:
        self.peer.close()
        while self._waits:
            end_wait(self._waits.popitem()[1])
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()

    async def _ended(self, within_s: float) -> bool:
        until = asyncio.get_running_loop().time() + within_s
        while self.process.ended() is None:
            if asyncio.get_running_loop().time() > until:
                return False
            await asyncio.sleep(0.01)
        return True


def tail_of_log(log: Path, count: int = LOG_LINES) -> str:
    """Return the last lines of a child's log, for an error; empty without a log."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return ""
    return "".join(f"  | {line}\n" for line in lines)
