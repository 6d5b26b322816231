"""Keep rollouts running: draw tasks, run them, and put the scored groups into the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from atropos_core.errors import NoProgress, PluginError
from atropos_core.guards.open_component import in_one_line
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import Label
from atropos_core.interfaces import Curriculum
from atropos_core.rollouts.runner import RolloutRunner, checked_group
from atropos_core.types import Draw, Failed, Sampling, ScoredGroup

ErrorT = TypeVar("ErrorT", bound=Exception)
CHECK_IT = (
    "Fix what is named here, or what it needs; `atropos check NAME` tries an environment or a reward without a run."
)
PATIENCE = 4  # times the number of groups at once that may fail in a row, before the run gives up


def no_progress(failed: int, last: ScoredGroup) -> NoProgress:
    cause = last.failed[0]
    return with_trace(
        NoProgress(
            f"the last {failed} groups all failed; the last of them in {cause.where}: {cause.cause}", remedy=CHECK_IT
        ),
        cause,
    )


def with_trace(error: ErrorT, cause: Failed) -> ErrorT:
    """Add a rollout's traceback to the error, to be printed below its remedy."""
    if cause.trace:
        error.add_note(cause.trace.rstrip())
    return error


def refuse_no_draws(draws: Sequence[Draw], wanted: int) -> None:
    """Raises PluginError if a curriculum gave no draws: the trainer would wait for groups for ever."""
    if not draws and wanted > 0:
        raise PluginError(
            f"the curriculum gave no draw where {wanted} were wanted: draw({wanted}) returned {draws!r}.",
            remedy="Let draw(n) give n draws, again from the first task once it has come to the last: a run ends by "
            "training.steps, not by its tasks.",
        )


class Producer:
    """Runs as many draws at once as `want` asks for. If a group fails, another task is drawn in its place, and `on_failed` must settle
    the failed draw."""

    def __init__(
        self,
        runner: RolloutRunner,
        curriculum: Curriculum,
        hub: Hub[ScoredGroup],
        *,
        group_size: int,
        min_group: int,
        sampling: Sampling,
        on_failed: Callable[[ScoredGroup], None],
    ) -> None:
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # raises what ended it
        self._runner = runner
        self._curriculum = curriculum
        self._hub = hub
        self._group_size = group_size
        self._min_group = min_group
        self._sampling = sampling
        self._on_failed = on_failed
        self._running: set[asyncio.Task[None]] = set()
        self._target = 0
        self._failed_in_a_row = 0

    def request(self, groups: int) -> None:
        """Make sure that `groups` groups wait in the hub or are being run."""
        self._target = groups
        missing = groups - len(self._hub) - len(self._running)
        if missing > 0:
            self._start(missing)

    def replace(self) -> None:
        """Run one more group, in place of one that cannot be used."""
        self._start(1)

    async def stop(self) -> None:
        """Cancel running rollouts. Their draws stay unsettled, and a resumed run draws them again."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self.broken.done() and not self.broken.cancelled():
            self.broken.exception()

    def _start(self, n: int) -> None:
        with in_one_line("the curriculum failed to draw"):
            draws = self._curriculum.draw(n)
        refuse_no_draws(draws, n)
        keys = [self._runner.schedule_keys(draw, self._group_size) for draw in draws]  # all, before any of them runs
        for draw, key in zip(draws, keys, strict=True):
            task = asyncio.create_task(self._run_draw(draw, key))
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def _run_draw(self, draw: Draw, keys: list[tuple[int, ...]]) -> None:
        group = checked_group(await self._runner.run(draw, keys, self._group_size, self._sampling))
        if len(group.episodes) >= self._min_group:
            self._failed_in_a_row = 0
            await self._hub.put(group, Label.of(group))
            current = asyncio.current_task()
            assert current is not None, "a coroutine runs in a task"
            self._running.discard(
                current
            )  # now: the caller that leases the group may ask for more before `_ended` is called
            return
        self._on_failed(group)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= PATIENCE * max(self._target, 1):
            raise no_progress(self._failed_in_a_row, group)
        self._start(1)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.broken.done():
            self.broken.set_exception(error)
