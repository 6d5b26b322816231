"""Parts of a discrete-event model: a clock with an event queue, a server with one queue, an engine that sequences share.

Events at the same time happen in the order in which they were scheduled, so a simulation gives the same result each time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from itertools import count

Process = Generator["float | Gate", None, None]
Event = Callable[[], None]


class Clock:
    """The simulated time in seconds, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def after(self, seconds: float, event: Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, process: Process) -> None:
        """Run events until `process` has ended or no event is left."""
        done = [False]

        def wrapped() -> Process:
            yield from process
            done[0] = True

        self.start(wrapped())
        while self._events and not done[0]:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def start(self, process: Process) -> None:
        """Start or resume a process. It yields a number of seconds to wait, or a gate."""
        try:
            wait = next(process)
        except StopIteration:
            return
        if isinstance(wait, Gate):
            wait.waiting.append(process)
        else:
            self.after(wait, lambda: self.start(process))


class Gate:
    """A gate at which processes wait until it is opened."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waiting: list[Process] = []

    def open(self) -> None:
        waiting, self.waiting = self.waiting, []
        for process in waiting:
            self._clock.start(process)


class Server:
    """`servers` servers with one queue, first come first served. Each serves one at a time: a hub's process, a worker's CPU."""

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
    """An engine that decodes a batch. A step of n sequences takes `step_s + n * sequence_s` seconds and gives each one token.

    A single sequence gets 1 / (step_s + sequence_s) tokens/s; all together never get more than 1 / sequence_s. At most `most`
    sequences are decoded at a time; the others wait, first come first served. Time is continuous: a sequence of l tokens
    leaves when the batch has advanced by l tokens since it came."""

    def __init__(self, clock: Clock, step_s: float, sequence_s: float, most: int) -> None:
        self._clock = clock
        self._step_s, self._sequence_s, self._most = step_s, sequence_s, most
        self._batch: list[tuple[float, int, Event]] = []  # ordered by `_advanced` at its end
        self._queue: deque[tuple[float, Event]] = deque()
        self._numbers = count()
        self._advanced = 0.0  # tokens that a sequence has received if it was there from the start
        self._since = 0.0
        self._round = 0  # number of the next valid event; earlier ones are void
        self._paused = False
        self.busy_s = self.sequence_seconds = self.tokens = 0.0

    def sample(self, tokens: float, then: Event) -> None:
        """Call `then` when the sequence has `tokens` tokens."""
        self._catch_up()
        self._queue.append((tokens, then))
        self._proceed()

    def pause(self) -> None:
        """Stop decoding. Sequences keep their tokens."""
        self._catch_up()
        self._paused = True
        self._round += 1

    def resume(self) -> None:
        self._catch_up()
        self._paused = False
        self._proceed()

    def settle_accounts(self) -> None:
        """Update the totals to the present time."""
        self._catch_up()

    @property
    def left(self) -> float:
        """Tokens still to be sampled, including those of waiting sequences."""
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
