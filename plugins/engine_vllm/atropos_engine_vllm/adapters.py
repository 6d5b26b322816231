"""Choose the adapter of a request, and when an adapter can be removed. Each load has its own name in the server, and is never in place.

Loading over a name in use mixes the two adapters, and a name that was used before meets its own cached prefixes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atropos_core.errors import DataError, DeadlineExceeded, WeightsMismatch
from atropos_engine_vllm.api import Api, Refused

LOAD_S = 120.0
ABORT_S = 2.0  # from giving up a request to its last step in the server, with a margin


@dataclass(eq=False)
class Loaded:
    """One adapter in the server."""

    name: str
    version: int | None  # of the policy; None: the adapter of a client
    number: int  # vLLM's own
    in_flight: int = 0
    aborted_at: float = float("-inf")  # time when a request was last given up


class Adapters:
    """At most `limit` adapters at once. The newest of the policy's serves new requests; an older one is removed when nothing uses it.
    Named adapters of clients are next to them, each until its client removes it."""

    def __init__(self, api: Api, limit: int, *, drain_s: float, taken: Iterable[str]) -> None:
        self.current: Loaded | None = None  # None: the base model
        self._named: dict[str, Loaded] = {}
        self._api = api
        self._limit = limit
        self._drain_s = drain_s
        self._loaded: list[Loaded] = []  # oldest first
        self._names = set(taken)  # all names ever used
        self._numbers: set[int] | None = None  # of the adapters that the workers have loaded; None: not known yet
        self._unused = asyncio.Event()  # set if there may be one to unload
        self._unloaded = asyncio.Event()
        self._unloading: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def of(self, name: str | None) -> Loaded | None:
        """Return the adapter of a client; None for the base model. Raises DataError for an unknown name."""
        if name is not None and name not in self._named:
            raise DataError(
                f"engine 'vllm' has no adapter {name!r}. Its adapters: {', '.join(sorted(map(repr, self._named))) or 'none'}.",
                remedy="Add it with add_adapter() first.",
            )
        return None if name is None else self._named[name]

    @asynccontextmanager
    async def using(self, taken: Loaded | None) -> AsyncIterator[Loaded | None]:
        """Yield this adapter, which stays until the block is left."""
        if taken is None:
            yield None
            return
        taken.in_flight += 1
        try:
            yield taken
        except BaseException:
            taken.aborted_at = time.monotonic()
            raise
        finally:
            taken.in_flight -= 1
            self._unused.set()

    async def load(self, directory: Path, version: int) -> None:
        """Returns once the server has read `directory`. It is not read again, because an adapter is removed only when nothing
        uses it, and vLLM never has more than it can hold. Raises WeightsMismatch if vLLM refuses it, DeadlineExceeded if no
        older one drains."""
        async with self._turn:
            self._begin_unloading()
            await self._wait_for_room()
            self.current = await self._load(directory, f"policy-v{version}", version)
            self._unused.set()

    async def add(self, directory: Path, name: str, check: Callable[[Loaded], Awaitable[None]]) -> None:
        """Load the adapter of a client, which stays until `remove`. Raises DataError if the name is taken, or if the server holds as many
        as it can; what `load` raises; and what `check` raises for the adapter, which is then unloaded."""
        async with self._turn:
            self._begin_unloading()
            if not name or name in self._named:
                raise DataError(
                    f"engine 'vllm' already has an adapter {name!r}." if name else "an adapter needs a name.",
                    remedy="Remove it first, or give the new one another name.",
                )
            if sum(map(self._is_kept, self._loaded)) >= self._limit:
                raise DataError(
                    f"the adapter {name!r} has no room: the vLLM server holds {self._limit} adapters already.",
                    remedy="Remove adapters that are not used any more, or raise engine.max_cpu_loras (of a server with a url, its"
                    " --max-cpu-loras).",
                )
            await self._wait_for_room()
            loaded = await self._load(directory, "named", None)
            loaded.in_flight += 1  # without a name it would count as unused
            try:
                await check(loaded)
                self._named[name] = loaded
            except BaseException:
                await self._unload(loaded)
                raise
            finally:
                loaded.in_flight -= 1

    async def remove(self, name: str) -> None:
        """Unload the adapter of a client once its requests in flight have ended. It has no new ones from now on. Raises DataError for an
        unknown name."""
        removed = self.of(name)
        del self._named[name]
        self._unused.set()
        while removed in self._loaded:
            self._check_unloading()
            self._unloaded.clear()
            await self._unloaded.wait()

    def _begin_unloading(self) -> None:
        if self._unloading is None:
            self._unloading = asyncio.create_task(self._unload_unused(), name="unloading adapters")

    async def _load(self, directory: Path, name: str, version: int | None) -> Loaded:
        if self._numbers is None:
            self._numbers = await self._loaded_numbers()
        name = self._new_name(name)
        body = {"lora_name": name, "lora_path": str(directory.resolve())}
        try:
            await self._api.post("/v1/load_lora_adapter", body, deadline_s=LOAD_S)
        except (DataError, Refused) as error:
            raise WeightsMismatch(
                f"vLLM refuses the adapter in {directory}: {error}",
                remedy="If you started the server separately, start it for adapters of the trainer's rank."
                if version is not None
                else None,
            ) from error
        before, self._numbers = self._numbers, await self._loaded_numbers()
        (number,) = self._numbers - before
        loaded = Loaded(name, version, number)
        self._loaded.append(loaded)
        return loaded

    def _is_kept(self, loaded: Loaded) -> bool:
        """True if requests may begin with it."""
        return loaded is self.current or loaded in self._named.values()

    async def close(self, *, unload: bool) -> None:
        """With `unload`, for a server that keeps running, all our adapters are removed from it."""
        if self._unloading is not None:
            self._unloading.cancel()
            await asyncio.gather(self._unloading, return_exceptions=True)
        for each in list(self._loaded) if unload else ():
            await self._unload(each)

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                while len(self._loaded) >= self._limit:
                    self._check_unloading()
                    self._unloaded.clear()
                    await self._unloaded.wait()
        except TimeoutError:
            oldest = next((one for one in self._loaded if not self._is_kept(one)), self._loaded[0])
            raise DeadlineExceeded(
                f"{oldest.in_flight} requests still sample with adapter {oldest.name!r} after {self._drain_s:g} s, and the"
                f" server holds only {self._limit} adapters.",
                remedy="Raise engine.max_loras (of a server with a url, its --max-loras), or lower sampling.max_tokens.",
            ) from None
        self._check_unloading()

    def _check_unloading(self) -> None:
        if self._unloading is not None and self._unloading.done():
            self._unloading.result()

    async def _unload_unused(self) -> None:
        """Unload adapters in the background: each call waits for a step of the engine's, and a publish need not wait
        for that."""
        try:
            while True:
                await self._unused.wait()
                self._unused.clear()
                waits = [self._idle_in(old) for old in self._loaded if not self._is_kept(old) and not old.in_flight]
                if waits and min(waits) > 0:
                    await asyncio.sleep(min(waits))
                for old in list(self._loaded):
                    if not self._is_kept(old) and not old.in_flight and self._idle_in(old) <= 0:
                        await self._unload(old)
                        self._unloaded.set()
                        self._unused.set()  # look again: another may be waiting for its time
        finally:
            self._unloaded.set()  # wake waiters: this task has ended

    @staticmethod
    def _idle_in(old: Loaded) -> float:
        """Seconds until an aborted request has surely left the server."""
        return old.aborted_at + ABORT_S - time.monotonic()

    async def _unload(self, old: Loaded) -> None:
        """Remove the name from the server and the adapter from its workers. The workers' own rule drops the least recently used
        one, and would read it again, from a directory that may be gone."""
        await self._api.post("/v1/unload_lora_adapter", {"lora_name": old.name})
        await self._api.post("/collective_rpc", {"method": "remove_lora", "args": [old.number]})
        self._loaded.remove(old)
        if self._numbers is not None:
            self._numbers.discard(old.number)

    async def _loaded_numbers(self) -> set[int]:
        """The numbers of the adapters that the workers hold."""
        listed = (await self._api.post("/collective_rpc", {"method": "list_loras"}))["results"]
        return {int(number) for number in re.findall(r"\d+", str(listed[0]))}  # "{1, 2}", or "set()"

    def _new_name(self, kind: str) -> str:
        name, again = kind, 1
        while name in self._names:
            again += 1
            name = f"{kind}-{again}"
        self._names.add(name)
        return name
