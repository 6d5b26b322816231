"""Parts that the episodes of a process share: one event loop in a separate thread, and each environment once."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from atropos_adapter_roll.config import EnvOptions
from atropos_core.config.component import Component
from atropos_core.config.resolve import resolve_component
from atropos_core.errors import DeadlineExceeded
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Environment
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext

T = TypeVar("T")

END_DEADLINE_S = 10.0
log = logging.getLogger(__name__)


class Loop:
    """An asyncio loop in a daemon thread. It handles no signals and sets no policy."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atropos-roll", daemon=True)
        self._thread.start()
        self.environments = Environments()

    def call(self, coroutine: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """Return its result. Raises its error, or DeadlineExceeded after cancelling it."""
        waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return waiting.result(deadline_s)
        except concurrent.futures.TimeoutError:
            if waiting.done():
                raise
            waiting.cancel()
            raise DeadlineExceeded(f"{what} did not come to an end within {deadline_s:g} s") from None

    def start(self, coroutine: Coroutine[Any, Any, None], deadline_s: float) -> asyncio.Task[None]:
        """Start a task of the loop. Raises DeadlineExceeded if something else blocks the loop."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(coroutine)

        try:
            return self.call(begin(), deadline_s, "starting an episode on the shared loop")
        except DeadlineExceeded:
            coroutine.close()
            raise

    def soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel running tasks, close the environments, end the thread. May be called twice."""
        if not self._thread.is_alive():
            return
        try:
            self.call(self._end(), END_DEADLINE_S, "the end of the episodes")
        except DeadlineExceeded as error:
            log.error("%s", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_DEADLINE_S / 2)
        await self.environments.close()


_lock = threading.Lock()
_loops: dict[int, Loop] = {}  # by process: a forked child has no thread of its parent's


def shared_loop() -> Loop:
    """This process's loop; its thread starts with the first call."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = loop = Loop()
            atexit.register(loop.close)
        return _loops[os.getpid()]


class Environments:
    """Each environment once in this process, open while a caller holds it. Only for the loop's thread."""

    def __init__(self) -> None:
        self._open: dict[str, Environment] = {}
        self._holders: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def hold(self, options: EnvOptions) -> Environment:
        """Build and open it if necessary. Raises errors of choosing, building and opening."""
        key = _key(options)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._open:
                environment = await asyncio.to_thread(build, options)
                await within(
                    environment.open(), options.open_deadline_s, f"environment {options.environment!r}: open()"
                )
                self._open[key] = environment
            self._holders[key] = self._holders.get(key, 0) + 1
            return self._open[key]

    async def release(self, options: EnvOptions) -> None:
        """Close it once no caller holds it."""
        key = _key(options)
        async with self._locks.setdefault(key, asyncio.Lock()):
            self._holders[key] -= 1
            if not self._holders[key]:
                await self._close(key, options.cleanup_deadline_s)

    async def close(self) -> None:
        for key in list(self._open):
            try:
                await self._close(key, END_DEADLINE_S)
            except Exception as error:  # noqa: BLE001 - the plugin boundary, and the process is ending
                log.error("an environment could not be closed: %s", error)

    async def _close(self, key: str, deadline_s: float) -> None:
        environment = self._open.pop(key)
        await within(environment.close(), deadline_s, f"{type(environment).__name__}: close()")


def build(options: EnvOptions) -> Environment:
    """Build the environment of the options, as a run file would. Raises ConfigError, UnknownComponent, PluginError."""
    component = Component.model_validate({"use": options.environment, **options.options})
    chosen = resolve_component(load_plugins().registry, "environment", "env_config.options", component)
    environment: Environment = chosen.build(RunContext(directory=Path.cwd(), model=Path.cwd(), label="environment"))
    return environment


def _key(options: EnvOptions) -> str:
    return json.dumps([options.environment, options.options], sort_keys=True)
