"""The trainer `grpo` on several devices: a first rank in this process, every other in a child, behind one interface. On several machines
there is one such trainer on each, and that of the first, which has rank 0, calls the others as it calls its own ranks.

Each call goes to all of them at once, and each does the same collective work (FSDP2, `sharding`). A refusal is raised by
all of them, and they continue. If one rank dies, or fails when the others do not, they stay inside a collective: then all
are ended, and this trainer with them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from atropos_core.errors import AtroposError, ConfigError, FitError, OutOfMemory, ProcessDied
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import ModelInfo, Writing
from atropos_core.processes.child import Child
from atropos_core.processes.forwarding import ForwardingTrainer, Method
from atropos_core.processes.proxies import HostedTrainer
from atropos_core.processes.rpc import as_received
from atropos_core.types import Batch, Floats, Metrics
from atropos_torch_models.network import LOOPBACK, listen
from atropos_trainer_grpo.machines import REASON_FIRST_S, Leader, end, follow
from atropos_trainer_grpo.process_group import ProcessGroup
from atropos_trainer_grpo.trainer import GrpoTrainer

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_trainer_grpo.config import GrpoOptions

T = TypeVar("T")

ALIKE_WITHIN_S = 10.0  # one rank's failure to that of the last: they were all doing the same
ENDS_AFTER_S = ALIKE_WITHIN_S + 10.0  # of a lost rank, this process: a call that is running raises first
JOIN_DEADLINE_S = 300.0  # of all, once they have been started
GIVE_UP_AFTER_S = 5.0  # on rank 0's own collective, once the others have been ended
MOVES = ("broadcast", "checkpoint", "adapter")  # transports that take a copy which rank 0 has made


class RankedTrainer(ForwardingTrainer):
    """One rank for each of the context's devices. `model` is rank 0's whole copy on the CPU, as of the last update. `OverMachines`."""

    def __init__(self, options: GrpoOptions, context: RunContext) -> None:
        devices = context.devices
        if (kinds := {device.partition(":")[0] for device in devices}) not in ({"cpu"}, {"cuda"}):
            raise ConfigError(f"trainer.devices names {' and '.join(sorted(kinds))}: ranks need devices of one kind.")
        if kinds == {"cuda"} and len(set(devices)) < len(devices):
            raise ConfigError(f"trainer.devices names one GPU twice ({', '.join(devices)}): each rank needs its own.")
        if context.transport is not None and context.transport not in MOVES:
            raise FitError(
                f"trainer.devices names {len(devices)} devices, and weights that are divided over ranks cannot travel by "
                f"{context.transport}.",
                remedy="Use --bridge checkpoint, or --bridge lora to train an adapter; or name one device.",
            )
        self._options = options
        self._context = dataclasses.replace(context, threads=max(1, (context.threads or 1) // len(devices)))
        self._rank = context.machine * len(devices)  # of the first
        self._size = context.machines * len(devices)
        self._first = GrpoTrainer(options, self._context, ProcessGroup(self._rank, self._size))
        self._others: list[HostedTrainer] = []
        self._leader: Leader | None = None
        self._following: asyncio.Future[None] | None = None
        self._failed: AtroposError | None = None
        self._turn = asyncio.Lock()  # one call at a time: two would meet in another order in each rank
        self._watch: asyncio.Future[None] | None = None

    @property
    def model(self) -> nn.Module:
        return self._first.model

    def weights_moved(self) -> None:
        raise FitError("the weights of several ranks cannot be replaced.", remedy="Use --bridge checkpoint.")

    async def lead(self, host: str) -> list[str]:
        self._leader = Leader(host)
        return [self._leader.expect() for _ in range(1, self._context.machines)]

    async def follow(self, leader: str) -> None:
        self._following = await follow(leader, self, {"join": self.join})

    async def open(self) -> ModelInfo:
        """Open all ranks. On machines other than the first, they have joined before this is called."""
        if self._context.machine == 0:
            if self._leader is not None:
                others = await self._leader.connected(self._context.directory / "logs", self._context.patience)
                self._others = [HostedTrainer(child) for child in others]
            host = LOOPBACK if self._leader is None else self._leader.host
            with listen(host) as listening:
                await self.join(host, listening.getsockname()[1], listening)
        return await self._together(self._first.open, lambda other: other.open())

    async def join(self, host: str, port: int, listening: socket.socket | None = None) -> None:
        """Join the ranks of all machines, at rank 0's address."""
        starting = [self._start(self._rank + number) for number in range(1, len(self._context.devices))]
        self._others += [HostedTrainer(child) for child in await _all_or_none(starting)]
        self._watch = asyncio.ensure_future(self._end_with_ranks()) if self._others else None
        await self._together(
            lambda: self._first.join(host, port, listening),
            lambda other: other.child.peer.call("join", host, port, deadline_s=JOIN_DEADLINE_S),
        )

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        left: asyncio.Future[None] = loop.create_future()

        @asynccontextmanager
        async def leading() -> AsyncIterator[None]:
            try:
                async with writing():
                    entered.set_result(None)
                    yield
                left.set_result(None)
            except BaseException as error:
                for waited in (entered, left):
                    if not waited.done():
                        waited.set_exception(ProcessDied(f"rank 0 failed while it was writing: {error}"))
                        waited.exception()  # seen: there may be no one waiting
                raise

        @asynccontextmanager
        async def alongside() -> AsyncIterator[None]:
            await asyncio.shield(entered)
            yield
            await asyncio.shield(left)  # collective work meanwhile, for the bridge, comes first

        return await self._together(
            lambda: self._first.step(batch, leading), lambda other: other.step(batch, alongside)
        )

    async def token_values(self) -> Mapping[str, Floats]:
        return await self._first.token_values()  # rank 0 has those of all

    async def forward(self, method: Method[T], *arguments: Any) -> T:
        name = method.__name__
        return await self._together(
            lambda: getattr(self._first, name)(*arguments), lambda other: getattr(other, name)(*arguments)
        )

    async def close(self) -> None:
        for task in (self._watch, self._following):
            if task is not None:
                task.cancel()
        await asyncio.gather(self._first.close(), *(other.close() for other in self._others))

    async def _start(self, rank: int) -> Child:
        logs = self._context.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        wanted = {
            "options": self._options.model_dump(mode="json"),
            "context": self._context.record(),
            "rank": rank,
            "size": self._size,
        }
        return await Child.start(
            f"trainer rank {rank}",
            wanted,
            logs / f"trainer-rank-{rank}.log",
            threads=self._context.threads or 1,
            program="atropos_trainer_grpo.rank",
            patience=self._context.patience,
        )

    async def _end_with_ranks(self) -> None:
        """End this trainer when one of its ranks ends, so that the run ends even while no request is pending."""
        waits = [asyncio.ensure_future(other.child.peer.lost.wait()) for other in self._others]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.sleep(ENDS_AFTER_S if self._turn.locked() else REASON_FIRST_S * (self._context.machines > 1))
        end(self._failed or self._dead())

    async def _together(
        self, own: Callable[[], Awaitable[T]], of_others: Callable[[HostedTrainer], Awaitable[Any]]
    ) -> T:
        """Return rank 0's answer. An error that all ranks raise is raised; any other error of a rank ends all of them."""
        async with self._turn:
            if self._failed is not None:
                raise self._failed
            failures: list[BaseException] = []

            def ended(call: asyncio.Future[Any]) -> None:
                if not call.cancelled() and (error := call.exception()) is not None:
                    failures.append(error)

            mine: asyncio.Future[T] = asyncio.ensure_future(own())
            calls: list[asyncio.Future[Any]] = [mine, *(asyncio.ensure_future(of_others(it)) for it in self._others)]
            for call in calls:
                call.add_done_callback(ended)
            try:
                await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
                await asyncio.sleep(0)  # the callbacks
                if not failures:
                    return mine.result()
                await asyncio.wait(calls, timeout=ALIKE_WITHIN_S)
            except asyncio.CancelledError:
                await self._end(calls, ProcessDied("a call of the trainer was cut short, and its ranks were ended"))
                raise
            alike = len(failures) == len(calls) and len({type(error) for error in failures}) == 1
            if alike and isinstance(failures[0], AtroposError) and not self._dead():
                raise mine.exception() or failures[0]
            why = self._dead() or self._as_ours(failures[0])
            await self._end(calls, why)
            raise why

    def _as_ours(self, error: BaseException) -> AtroposError:
        if isinstance(error, AtroposError):
            return error
        if isinstance(refused := as_received(f"trainer rank {self._rank}", error), OutOfMemory):
            return refused
        return ProcessDied(
            f"the trainer's ranks were ended, for rank {self._rank} raised {type(error).__name__}: {error}"
        )

    def _dead(self) -> AtroposError | None:
        return next((error for other in self._others if (error := other.child.peer.error) is not None), None)

    async def _end(self, calls: Sequence[asyncio.Future[Any]], why: AtroposError) -> None:
        self._failed = why
        await asyncio.gather(*(other.child.kill() for other in self._others))
        for call in calls:
            call.cancel()  # rank 0's own ends when its collective does: gloo sees that the others have gone
        await asyncio.wait(calls, timeout=GIVE_UP_AFTER_S)


async def _all_or_none(starting: Sequence[Awaitable[Child]]) -> list[Child]:
    results = await asyncio.gather(*starting, return_exceptions=True)
    children = [result for result in results if isinstance(result, Child)]
    if len(children) < len(results):
        closed = await asyncio.gather(*(child.close() for child in children), return_exceptions=True)
        raise_first([*results, *closed])
    return children
