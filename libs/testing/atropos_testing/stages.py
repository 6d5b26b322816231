"""A contract that follows a component's life: each stage is a coroutine that returns what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from atropos_core.errors import ConfigError
from atropos_core.interfaces import Finding
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.training.parts import Openable
from atropos_testing import eventloop
from atropos_testing.report import RAISED, Report, of_error
from atropos_testing.subject import Subject

DEADLINE_S = 120.0
OPEN_DEADLINE_S = 300.0  # a model may have to be loaded

Stage = Callable[[], Awaitable[Sequence[str]]]


class StagedContract:
    """The component is built and opened once, goes through its stages in order, and is closed twice. A stage that raises is broken."""

    stages: ClassVar[Mapping[str, tuple[str, str]]]  # name -> text if it is fine, and the remedy if not; in order
    # "odd steps" is the method check_odd_steps, which returns what is wrong
    beside_rollouts: ClassVar[bool] = True  # it runs during rollouts, so it may not block the event loop
    made: Any

    def __init__(self, subject: Subject, *, skip: Sequence[str] = ()) -> None:
        self.subject = subject
        watched = (eventloop.EVENT_LOOP,) if self.beside_rollouts else ()
        self.report = Report(("opens", *self.stages, *watched, "closes"), skip)

    def findings(self) -> list[Finding]:
        eventloop.run(self._check())
        return self.report.findings

    async def open(self) -> Sequence[str]:
        """Build and open `made`; return what is wrong with it."""
        self.made = await self.opened()
        return []

    async def opened(self) -> Any:
        """Return another instance of the component, open."""
        made = self.subject.make()
        if isinstance(made, Openable):
            async with asyncio.timeout(OPEN_DEADLINE_S):
                await made.open()
        return made

    async def opened_with_a_model(self) -> tuple[Any, Any]:
        """Return another engine or trainer, and the result of its `open()`: with the toy's model, or, if it cannot open that, with
        `tiny`, if a plugin offers it. `subject` keeps that model from then on. Raises what opening the last one raised."""
        try:
            return await self._opened(self.subject)
        except RAISED:  # the plugin boundary: a component's code
            if (tiny := _tiny()) is None or self.subject.context.model == tiny:
                raise
            self.subject = replace(self.subject, context=replace(self.subject.context, model=tiny))
            return await self._opened(self.subject)

    async def _opened(self, subject: Subject) -> tuple[Any, Any]:
        made = subject.make()
        made.endpoint = LocalEndpoint(made)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                return made, await made.open()
        except BaseException:
            await made.close()
            raise

    async def _check(self) -> None:
        problems = await self._problems(self.open)
        remedy = "Everything else is checked once it opens."
        if not self.report.check("opens", problems, good="built and opened", remedy=remedy):
            return
        with eventloop.watched() as watch, nullcontext() if self.beside_rollouts else watch.off():
            for name, (good, remedy) in self.stages.items():
                problems = await self._problems(getattr(self, f"check_{name.replace(' ', '_')}"))
                self.report.check(name, problems, good=good, remedy=remedy)
        if self.beside_rollouts:
            watch.tell(self.report, "Await what takes long: asyncio.to_thread for computations.")
        problems = await self._problems(self._close_twice)
        self.report.check("closes", problems, good="closed twice", remedy="close() may be called twice.")

    async def _close_twice(self) -> Sequence[str]:
        if (close := getattr(self.made, "close", None)) is not None:
            await close()
            await close()
        return []

    async def _problems(self, stage: Stage) -> Sequence[str]:
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S if stage == self.open else DEADLINE_S):
                return await stage()
        except TimeoutError as error:
            return [str(error) or "did not end in time"]
        except (*RAISED, eventloop.Blocked) as error:  # the plugin boundary: a component's code
            return [of_error(error)]


def _tiny() -> Path | None:
    from atropos_core.plugins.manager import load_plugins

    try:
        return load_plugins().resolve_model("tiny", download=False).directory
    except ConfigError:
        return None
