"""The child's side: `python -m atropos_core.processes.child_main CONNECTION ROLE`, which only launchers start. CONNECTION is a file
descriptor of this process, or the HOST:PORT of a supervisor on another machine.

It loads plugins as the supervisor does, builds one component, and answers calls on it until the supervisor hangs up or ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from atropos_core.console.waits import pass_waits_on
from atropos_core.errors import AtroposError, ConfigError, RunDirectoryError
from atropos_core.guards.collector import without_collector
from atropos_core.guards.exits import contain_tasks
from atropos_core.guards.open_component import opened
from atropos_core.interfaces import Engine, Measured, ModelInfo, OverMachines, Stateful, Trainer
from atropos_core.processes.dialing import dial
from atropos_core.processes.extension import Extension
from atropos_core.processes.forwarding import extras, methods
from atropos_core.processes.reward_metrics import ReportedMetrics, reported_metrics
from atropos_core.processes.rpc import Handler, Peer
from atropos_core.turn_rewards import Placed, split_scores
from atropos_core.types import Batch, Episode, Metrics, Task

WAITS_DEADLINE_S = 60.0
WRITING_DEADLINE_S = 3600.0  # a bridge may save and load a whole model in it; its own deadlines are shorter
TAKE_DIRECTORY = frozenset({"load_weights", "load_adapter", "save", "restore"})
TAKE_DIRECTORY |= {"add_adapter", "save_adapter", "restore_adapter"}
_PR_SET_PDEATHSIG = 1


class Host:
    """One component, and the calls to it."""

    def __init__(self) -> None:
        self.peer: Peer
        self.role = sys.argv[2] if len(sys.argv) > 2 else ""
        self.component: Any = None
        self._extension: Extension
        self.ended = asyncio.Event()

    def handlers(self) -> dict[str, Handler]:
        return {
            "build": self.build,
            "close": self.close,
            "load_extension": self.load_extension,
            "call_extension": self.call_extension,
        }

    async def build(self, wanted: dict[str, Any]) -> None:
        """Build the component. `wanted` has kind, name, options, the fields of a RunContext as `context`, and the supervisor's module
        path; or the kind "function" and a name."""
        from atropos_core.plugins.manager import load_plugins
        from atropos_core.plugins.provider import RunContext
        from atropos_core.plugins.references import load_reference

        if wanted["kind"] == "function":
            function = load_reference(wanted["name"])

            async def call(*arguments: Any) -> Any:
                return function(*arguments)  # in this process's only thread: the caller's deadline ends the process

            self.peer.handlers["call"] = call
            return

        sys.path.extend(entry for entry in wanted.get("path", ()) if entry not in sys.path)
        context = RunContext.from_record(wanted["context"])
        if self.peer.is_remote:
            _require_shared(context.directory / "logs" / f"{self.role}.log", context.model)
        with without_collector():
            offer = load_plugins().registry.find(wanted["kind"], wanted["name"])
            options = offer.provider.options.model_validate(wanted["options"])
            self.offer(wanted["kind"], offer.provider.build(options, context))

    def offer(self, kind: str, component: Any) -> None:
        """Answer calls on this component from now on."""
        self.component = component
        if isinstance(component, Engine | Trainer):
            interface: type[Engine | Trainer] = Engine if isinstance(component, Engine) else Trainer
            for name in methods(interface) + methods(extras(interface)):
                call = getattr(component, name, None) or _refusing(component, name)
                self.peer.handlers[name] = with_directory(call) if name in TAKE_DIRECTORY else call
            self.peer.handlers |= {"open": self.open, "close": self.close}
            if isinstance(component, Trainer):
                self.peer.handlers["step"] = self.step
            if isinstance(component, OverMachines):
                self.peer.handlers |= {"lead": self.lead, "follow": component.follow}
        elif kind == "reward":
            if isinstance(component, Stateful):
                raise ConfigError(
                    f"{type(component).__name__} keeps what it has learned with the run, and would lose it in a process of "
                    "its own, which ends at a deadline.",
                    remedy='Remove runs_in = "process" from it; its parts may use processes of their own.',
                )
            self.peer.handlers |= {"open": self.open_reward, "reward": self.reward}
        else:
            raise ConfigError(f"a {kind} cannot run in a child process")

    async def open(self) -> ModelInfo:
        with without_collector():
            info: ModelInfo = await self.component.open()
        return info

    async def lead(self) -> list[str]:
        return list(await self.component.lead(self.peer.own_host))

    async def open_reward(self, named: str) -> None:
        with without_collector():
            await opened(named, self.component)

    async def step(self, batch: Batch) -> Metrics:
        @asynccontextmanager
        async def writing() -> AsyncIterator[None]:
            await self.peer.call("enter_writing", deadline_s=WRITING_DEADLINE_S)
            try:
                yield
            except BaseException as error:
                await self.peer.call("leave_writing", f"{type(error).__name__}: {error}", deadline_s=WRITING_DEADLINE_S)
                raise
            await self.peer.call("leave_writing", None, deadline_s=WRITING_DEADLINE_S)

        metrics: Metrics = await self.component.step(batch, writing)
        return metrics

    async def reward(
        self, task: Task, episodes: Sequence[Episode]
    ) -> tuple[Any, list[Placed | None] | None, ReportedMetrics | None, Metrics]:
        """Return the totals [G], as the reward gave them, its turn rewards, what it reports of each rollout, and its own metrics."""
        answer = await self.component(task, episodes)
        totals, turns = split_scores(answer, episodes)
        return (
            totals,
            turns,
            reported_metrics(answer),
            self.component.metrics() if isinstance(self.component, Measured) else {},
        )

    async def load_extension(self, reference: str) -> None:
        self._extension = Extension.load(reference, self.component)

    async def call_extension(self, method: str, *arguments: Any, descriptors: Sequence[int]) -> Any:
        return await self._extension.call(method, arguments, descriptors)

    async def close(self) -> None:
        if hasattr(self.component, "close"):
            await self.component.close()
        self.ended.set()


def _require_shared(log: Path, model: Path) -> None:
    """Raises RunDirectoryError or ConfigError if this machine does not share the directories that are used by path. `log`: a file
    that the supervisor has made there."""
    here = socket.gethostname()
    if not log.exists():
        raise RunDirectoryError(
            f"the run directory {log.parent.parent} is not on {here}, where this was started.",
            remedy="Name one on a file system that all these machines share: --dir.",
        )
    if not model.is_dir():
        raise ConfigError(
            f"the model directory {model} is not on {here}, where this was started.",
            remedy="Copy it there, under the same path, or name one on a file system that all these machines share.",
        )


def _refusing(component: Engine | Trainer, method: str) -> Handler:
    async def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(f"{type(component).__name__} has no {method}(): it does not work with named adapters")

    return refuse


def with_directory(method: Handler) -> Handler:
    """Wrap a method so that its directory can be sent as text."""

    async def call(directory: str, *arguments: Any) -> Any:
        return await method(Path(directory), *arguments)

    return call


async def serve(connection: socket.socket, host: Host) -> None:
    async def say(number: int, what: str | None) -> None:
        with suppress(AtroposError):  # who has hung up waits for nothing
            await host.peer.call("waits", number, what, deadline_s=WAITS_DEADLINE_S)

    contain_tasks(asyncio.get_running_loop())  # what a component raises to end the process is an error of that call
    host.peer = Peer(connection, "the supervisor", host.handlers(), takes_descriptors=frozenset({"call_extension"}))
    pass_waits_on(lambda number, what: asyncio.ensure_future(say(number, what)))
    waits = [asyncio.ensure_future(host.ended.wait()), asyncio.ensure_future(host.peer.lost.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.05)  # the answer to `close` leaves first


def end_with_parent() -> None:
    """End this process with its parent: the supervisor, or the process that started it here for the supervisor."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(3)


def main(made: type[Host] = Host) -> None:
    where = sys.argv[1]  # the role after it is for listings of processes
    end_with_parent()
    connection = socket.socket(fileno=int(where)) if where.isdecimal() else dial(where)
    connection.set_inheritable(False)
    asyncio.run(serve(connection, made()))
    os._exit(0)  # threads that still compute for a supervisor that is gone have no one to hand it to


if __name__ == "__main__":
    main()
