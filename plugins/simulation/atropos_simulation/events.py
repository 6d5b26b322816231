"""What a discrete-event model is made of: a clock with a queue of events, a server with one queue, an engine whose sequences
share it.

Events of one time happen in the order in which they were scheduled, so that a simulation is the same each time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Gate", None, None]
Event = Callable[[], None]


class Clock:
    """Seconds since the beginning, and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, process: Process) -> None:
        """Until `process` has ended, or nothing is left to happen."""
        done = [False]

        def wrapped() -> Process:
            yield from process
            done[0] = True

        self.start(wrapped())
        while self._events and not done[0]:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def start(self, process: Process) -> None:
        """Go on with it: what it yields is a number of seconds to wait, or a gate."""
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Gate):
            wait.waiting.append(process)
        else:
            self.after(wait, lambda: self.start(process))


class Gate:
    """Where a process waits until somebody opens it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waiting: list[Process] = []

    def open(self) -> None:
        waiting, self.waiting = self.waiting, []
        for process in waiting:
            self._clock.start(process)


class Server:
    """One at a time, first come first served: a hub's process, a worker's processor. `servers` of them share one queue."""

    def __init__(self, clock: Clock, service: Callable[[], float], servers: int = 1) -> None:
        self._clock = clock
        self._service = service
        self._free = servers
        self._queue: deque[tuple[float, Event]] = deque()
        self.servers = servers
        self.busy_s = 0.0  # of all servers together
        self.waited_s = 0.0  # of all that were served, before their service
        self.served = 0

    def serve(self, then: Event) -> None:
        self._queue.append((self._clock.now, then))
        self._proceed()

    def _proceed(self) -> None:
        while self._free and self._queue:
            came, then = self._queue.popleft()
            self._free -= 1
            seconds = self._service()
            self.waited_s += self._clock.now - came
            self.busy_s += seconds
            self.served += 1
            self._clock.after(seconds, lambda then=then: self._served(then))  # type: ignore[misc]

    def _served(self, then: Event) -> None:
        self._free += 1
        then()
        self._proceed()


class Engine:
    """Decodes a batch: a step of n sequences takes `step_s + n * sequence_s` seconds and gives each of them a token, so that a
    sequence alone has 1 / (step_s + sequence_s) tokens/s, and all together never more than 1 / sequence_s. Beyond
    `most` sequences the others wait, first come first served. As a fluid: a sequence of l tokens leaves once each in the batch
    has advanced by l since it came."""

    def __init__(self, clock: Clock, step_s: float, sequence_s: float, most: int) -> None:
        self._clock = clock
        self._step_s, self._sequence_s, self._most = step_s, sequence_s, most
        self._batch: list[tuple[float, int, Event]] = []  # by where it leaves
        self._queue: deque[tuple[float, Event]] = deque()
        self._numbers = count()
        self._advanced = 0.0  # tokens that a sequence has got that was there from the beginning
        self._since = 0.0
        self._round = 0  # of the event that is to come: earlier ones are void
        self._paused = False
        self.busy_s = self.sequence_seconds = self.tokens = 0.0

    def sample(self, tokens: float, then: Event) -> None:
        """`then` once it has so many tokens."""
        self._catch_up()
        self._queue.append((tokens, then))
        self._proceed()

    def pause(self) -> None:
        """Keeps what it has."""
        self._catch_up()
        self._paused = True
        self._round += 1

    def resume(self) -> None:
        self._catch_up()
        self._paused = False
        self._proceed()

    def settle_accounts(self) -> None:
        """Count what it has done until now."""
        self._catch_up()

    @property
    def left(self) -> float:
        """Tokens that its sequences still want, those that wait as well."""
        return sum(at - self._advanced for at, _, _ in self._batch) + sum(tokens for tokens, _ in self._queue)

    def _token_s(self) -> float:
        return self._step_s + self._sequence_s * len(self._batch)

    def _catch_up(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if self._batch and not self._paused:
            advanced = elapsed / self._token_s()
            self._advanced += advanced
            self.busy_s += elapsed
            self.sequence_seconds += elapsed * len(self._batch)
            self.tokens += advanced * len(self._batch)

    def _proceed(self) -> None:
        while self._queue and len(self._batch) < self._most:
            tokens, then = self._queue.popleft()
            heapq.heappush(self._batch, (self._advanced + tokens, next(self._numbers), then))
        self._round += 1
        if self._batch and not self._paused:
            left = max(self._batch[0][0] - self._advanced, 0.0)
            number = self._round
            self._clock.after(left * self._token_s(), lambda: self._leaves(number))

    def _leaves(self, number: int) -> None:
        if number != self._round:
            return
        self._catch_up()
        at, _, then = heapq.heappop(self._batch)
        self._advanced = at  # exactly: no rounding of the clock is carried on
        left = [then]
        while self._batch and self._batch[0][0] <= at:
            left.append(heapq.heappop(self._batch)[2])
        self._proceed()
        for one in left:
            one()
