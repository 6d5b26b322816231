"""Watch the calls to a server for long silence."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from atropos_core import console
from atropos_core.errors import ProcessSilent
from atropos_core.guards.patience import LOOK_S, Owed, Patience


class ServerWatch:
    """Watches the calls to one server: warns when it has answered none for long, and again each time that time has doubled. If
    `needed`, the server is given up at the limit; otherwise calls have their own deadlines, or another process watches it."""

    def __init__(self, name: str, patience: Patience, *, needed: bool) -> None:
        self.excused: Collection[str] = ()  # kinds of calls that need no answer now
        self._name, self._patience, self._needed = name, patience, needed
        self._owed = Owed()
        self._numbers = itertools.count()
        self._limits: dict[int, asyncio.Timeout] = {}  # of the calls that wait
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def call(self, kind: str) -> AsyncIterator[None]:
        """Watch one call. Raises ProcessSilent at the limit."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        limit = asyncio.timeout(None)
        self._owed.begin(number, kind, loop.time())
        try:
            async with limit:
                self._limits[number] = limit
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise ProcessSilent(
                f"{self._name} gave no answer to {kind} for {self._owed.silent_s(loop.time()):.0f} s: its process is stopped "
                "or hangs, or it is out of reach.",
                remedy="Look at its machine and its log. If it was only slow, raise watch.least_s or watch.times.",
            ) from None
        else:
            self._owed.answered(number, loop.time())
            self._owed.end_silence(loop.time())
        finally:
            del self._limits[number]
            self._owed.given_up(number, loop.time(), late=True)

    async def _watch(self) -> None:
        loop, reported_s = asyncio.get_running_loop(), 0.0
        while self._limits:
            await asyncio.sleep(min(LOOK_S, self._patience.say_s / 8))
            self._owed.excuse(self.excused, loop.time())
            silent_s, usual_s = self._owed.silent_s(loop.time()), self._owed.usual_s() or 0.0
            if silent_s < reported_s:
                console.say(f"{self._name} answers again")
                reported_s = 0.0
            bound_s = max(self._patience.least_s, self._patience.times * usual_s)
            if silent_s >= max(self._patience.say_s, 2 * usual_s, 2 * reported_s):
                reported_s = silent_s
                outlook = f" It is given up after {bound_s:.0f} s (watch.least_s, watch.times)." if self._needed else ""
                console.warn(
                    f"{self._name} has given no answer to {self._owed.last} for {silent_s:.0f} s: its process may be stopped "
                    f"or hang, or it is out of reach.{outlook}"
                )
            if self._needed and silent_s >= bound_s:
                for limit in self._limits.values():
                    limit.reschedule(loop.time())
