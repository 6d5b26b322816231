"""The draws that the trainer offers, the workers that run them, and the groups that have come back.

A draw is waiting, with one worker, or back: its group is in the hub. Of two groups of one draw, the first counts. When the trainer
begins a new session, waiting draws are forgotten (it offers again what it wants), and workers keep the draws that they run: if the same
draw is offered again, it is not run twice. If the new session is another run's, those draws are unwanted: another run with the same
seed has the same draws, but must not get what other weights sampled.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from atropos_core.types import Draw, Sampling


@dataclass(frozen=True)
class Rules:
    """How the present trainer wants its draws run."""

    group_size: int
    min_group: int
    sampling: Sampling
    deadline_s: float | None = None  # for each rollout; None: the worker's own


class Draws:
    """Synchronous except for `take`. An `id` below 0 is a group without a draw, which this class ignores."""

    def __init__(self, present: Iterable[int] = ()) -> None:
        self.rules: Rules | None = None  # None: no trainer
        self._waiting: dict[str, deque[Draw]] = {}  # by environment
        self._offered: dict[int, Draw] = {}  # waiting and running
        self._worker_of: dict[int, str] = {}  # draw -> worker
        self._present = set(present)  # draws whose groups are in the hub
        self._foreign: set[tuple[str, int]] = set()  # worker, and a draw of another run that it still runs
        self._known = False  # True if the trainer has told this process which draws it wants
        self._asking: Counter[str] = Counter()  # workers that wait, by environment
        self._changed = asyncio.Event()
        self._stopped = False

    def begin(
        self,
        rules: Rules | None,
        present: Iterable[int],
        *,
        anew: bool,
        running: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Begin a trainer's session, or (without rules) end it. Groups of the draws `present` are in the hub. `anew`: the session
        is another run's, so its draws have nothing to do with those in `running`, listed with their workers."""
        self.rules = rules
        self._present = set(present)
        self._waiting.clear()
        self._offered = {} if anew else {number: self._offered[number] for number in self._worker_of}
        if anew:
            self._foreign |= {(worker, number) for number, worker in self._worker_of.items()} | set(running)
            self._worker_of.clear()
            self._known = True
        self._changed.set()

    def offer(self, draws: Iterable[Draw], running: Mapping[int, str]) -> int:
        """Add draws and return how many were new. `running`: what workers report as running."""
        added = 0
        for draw in draws:
            if draw.id in self._present or self._offered.get(draw.id) == draw:
                continue
            added += 1
            self._offered[draw.id] = draw
            if draw.id in running and (running[draw.id], draw.id) not in self._foreign:
                self._worker_of[draw.id] = running[draw.id]
            else:
                self._worker_of.pop(draw.id, None)
                self._waiting.setdefault(draw.environment, deque()).append(draw)
        self._known = True
        self._changed.set()
        return added

    async def take(self, worker: str, environment: str, n: int, wait_s: float) -> list[Draw]:
        """Up to `n` draws for this worker, the oldest first; none if none comes in time. Workers that wait together
        share what comes."""
        until = asyncio.get_running_loop().time() + wait_s
        self._asking[environment] += 1
        try:
            while not (fit := self._fitting(worker, environment)):
                if self._stopped:
                    return []
                left = until - asyncio.get_running_loop().time()
                self._changed.clear()
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    return []
            share = -(-len(fit) // self._asking[environment])
        finally:
            self._asking[environment] -= 1
        taken = fit[: min(n, share)]
        for draw in taken:
            self._waiting[environment].remove(draw)
        self._worker_of |= {draw.id: worker for draw in taken}
        return taken

    def stop(self) -> None:
        """End all waiting for draws."""
        self._stopped = True
        self._changed.set()

    def _fitting(self, worker: str, environment: str) -> list[Draw]:
        """Waiting draws for this worker, and none while no trainer says how to run them. A draw is left out if the worker runs one
        with the same number for another run, because their groups could not be told apart."""
        if self.rules is None:
            return []
        return [draw for draw in self._waiting.get(environment, ()) if (worker, draw.id) not in self._foreign]

    def keep_running(self, worker: str, numbers: Collection[int]) -> None:
        """A worker reports all that it runs. Draws of another run that it has finished may be drawn for it again."""
        done = {(one, number) for one, number in self._foreign if one == worker and number not in numbers}
        if done:
            self._foreign -= done
            self._changed.set()

    def refusal(self, draw: Draw, worker: str = "") -> str | None:
        """The reason why a group of this draw from this worker is not wanted, or None."""
        if (worker, draw.id) in self._foreign:
            return f"draw {draw.id} was run for another run"
        if draw.id < 0 or self._offered.get(draw.id) == draw:
            return None
        if draw.id in self._present:
            return f"draw {draw.id} has been run already"
        if draw.id in self._offered or self._known:
            return f"draw {draw.id} of {draw.environment!r} is not one that the trainer wants"
        return None  # this process has just started, and the trainer has not yet said which draws it wants

    def arrived(self, draw: Draw) -> None:
        """Record that the draw's group is in the hub."""
        if draw.id >= 0:
            self._present.add(draw.id)
            self._forget(draw.id)

    def failed(self, draw: Draw, worker: str = "") -> bool:
        """Record that too few rollouts succeeded. Returns True if the trainer will hear of it, False if the draw is unwanted."""
        wanted = self._offered.get(draw.id) == draw and (worker, draw.id) not in self._foreign
        if wanted:
            self._forget(draw.id)
        return wanted

    def gone(self, number: int) -> None:
        """Record that the draw's group has left the hub for good."""
        self._present.discard(number)

    def mark_running(self, worker: str, numbers: Iterable[int]) -> None:
        """Record what a worker runs that registers, possibly again."""
        for number in numbers:
            draw = self._offered.get(number)
            if draw is not None and number not in self._worker_of:
                self._waiting[draw.environment].remove(draw)
                self._worker_of[number] = worker

    def give_back(self, worker: str, *, only: Iterable[int] | None = None) -> int:
        """Return this worker's draws, or `only` these, to the front of the queue. Returns their number."""
        chosen = self._worker_of if only is None else only
        numbers = sorted(number for number in chosen if self._worker_of.get(number) == worker)
        for number in reversed(numbers):
            del self._worker_of[number]
            draw = self._offered[number]
            self._waiting.setdefault(draw.environment, deque()).appendleft(draw)
        if numbers:
            self._changed.set()
        return len(numbers)

    def status(self) -> dict[str, int]:
        waiting = {f"waiting/{name}": len(queue) for name, queue in self._waiting.items() if queue}
        return {"waiting": sum(waiting.values()), "playing": len(self._worker_of), **waiting}

    @property
    def present(self) -> list[int]:
        """Draws whose groups are in the hub."""
        return sorted(self._present)

    @property
    def in_progress(self) -> list[int]:
        """Draws that a worker runs."""
        return sorted(self._worker_of)

    def _forget(self, number: int) -> None:
        draw = self._offered.pop(number, None)
        if draw is not None and self._worker_of.pop(number, None) is None:
            self._waiting[draw.environment].remove(draw)
