"""The bridge for one process: engine and trainer hold the same numpy arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter

from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import Bridge, Endpoint, Engine, Publication
from atropos_core.processes.endpoints import LocalEndpoint


class LocalBridge(Bridge):
    """Gives the trainer's `weights` (a dict of arrays) to the engine, which keeps them: nothing is ever copied."""

    def __init__(self) -> None:
        self._engines: Sequence[Engine] = ()

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        self._engines = engines
        for end in (trainer, *(engine.endpoint for engine in engines)):
            if not isinstance(end, LocalEndpoint):
                raise FitError("bridge 'local' joins parts of one process, but one of these is in a child process.")
        source = trainer.component.weights  # type: ignore[attr-defined] # a LocalEndpoint, checked above
        for engine in engines:
            sink = engine.endpoint.component  # type: ignore[attr-defined]
            if {name: value.shape for name, value in source.items()} != {n: v.shape for n, v in sink.weights.items()}:
                raise WeightsMismatch("engine and trainer have weights of different names or shapes.")
            sink.weights = source

    def writing(self, version: int) -> AbstractAsyncContextManager[None]:
        return self._write(version)

    @asynccontextmanager
    async def _write(self, version: int) -> AsyncIterator[None]:
        start = perf_counter()
        for engine in self._engines:
            await engine.pause()
        seconds = perf_counter() - start
        yield
        start = perf_counter()
        for engine in self._engines:
            await engine.resume(version)
        self.published = Publication(version, seconds + perf_counter() - start, 0)
