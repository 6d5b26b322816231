"""The sandbox `process` with one planted bug each, and the checks that must name it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_agent_api.sandboxes.monitored import MonitoredProgram
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_core.errors import SandboxError
from atropos_core.sandboxes import Exit, Inside, Network, Program, RunningProgram, Sandbox


class SharesItsEnvironment(ProcessSandbox):
    async def start_monitored(
        self, program: Program, argv: Sequence[str], environment: Mapping[str, str], **more: Any
    ) -> MonitoredProgram:
        return await super().start_monitored(program, argv, {**os.environ, **environment}, **more)


class ErrorsAmongOutput(ProcessSandbox):
    async def start(self, program: Program) -> RunningProgram:
        merged = ["sh", "-c", 'exec "$@" 2>&1', "sh", *program.argv] if program.argv[0] == "sh" else program.argv
        return await super().start(replace(program, argv=merged))


class PrintsTwiceAsMuch(ProcessSandbox):
    async def start(self, program: Program) -> RunningProgram:
        limits = replace(program.limits, output_bytes=2 * program.limits.output_bytes)
        return await super().start(replace(program, limits=limits))


class WorksInPlace(ProcessSandbox):
    async def start_monitored(
        self, program: Program, argv: Sequence[str], environment: Mapping[str, str], **more: Any
    ) -> MonitoredProgram:
        where = more if program.inputs is None else {**more, "cwd": str(program.inputs)}
        return await super().start_monitored(program, argv, environment, **where)


class HoldsToNothing(ProcessSandbox):
    """To no network, that is, though it was requested to."""

    async def start(self, program: Program) -> RunningProgram:
        return await super().start(replace(program, network="host"))


class SaysAnotherHome(ProcessSandbox):
    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return replace(super().inside(name, api_url, network), home="/root")


class SharesItsFiles(ProcessSandbox):
    """Two programs at once begin with what the first of them has written."""

    async def start(self, program: Program) -> RunningProgram:
        if program.name.startswith("once"):
            shared = self.folder() / "shared"
            shared.mkdir(exist_ok=True)
            text = f"cd {shared}; {program.argv[2]}"
            program = replace(program, argv=[*program.argv[:2], text, *program.argv[3:]])
        return await super().start(program)


class LeavesAHelper(ProcessSandbox):
    """One for each program, with its command, until the sandbox is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._helpers: list[subprocess.Popen[bytes]] = []

    async def start(self, program: Program) -> RunningProgram:
        running = await super().start(program)
        self._helpers.append(subprocess.Popen(["sh", "-c", "sleep 30; :", *program.argv], start_new_session=True))
        return running

    async def close(self) -> None:
        for helper in self._helpers:
            helper.kill()
            helper.wait()
        self._helpers.clear()
        await super().close()


class Changed(RunningProgram):
    """Of a program, what `end` makes of its Exit."""

    def __init__(self, inner: RunningProgram) -> None:
        self.inner = inner

    def end(self, ended: Exit) -> Exit:
        return ended

    async def wait(self) -> Exit:
        return self.end(await self.inner.wait())

    async def stop(self) -> None:
        await self.inner.stop()

    async def work(self) -> Path:
        return await self.inner.work()

    async def close(self) -> None:
        await self.inner.close()


class AsShellsCount(Changed):
    def end(self, ended: Exit) -> Exit:
        return ended if ended.signal is None else replace(ended, code=128 + ended.signal, signal=None)


class NotStopped(Changed):
    def end(self, ended: Exit) -> Exit:
        return replace(ended, stopped=False)


class GoneTooSoon(Changed):
    async def work(self) -> Path:
        work = await self.inner.work()
        shutil.rmtree(work)
        return work


class EndsWell(Changed):
    async def wait(self) -> Exit:
        try:
            return await self.inner.wait()
        except SandboxError:
            return Exit(0, None, None, False, 0, 0.0)


def with_programs(changed: type[Changed]) -> type[Sandbox]:
    class Made(ProcessSandbox):
        async def start(self, program: Program) -> RunningProgram:
            return changed(await super().start(program))

    Made.__name__ = changed.__name__
    return Made


class NeverStarts(ProcessSandbox):
    async def start(self, program: Program) -> RunningProgram:
        raise SandboxError("no room")


class NamesNoNetwork(ProcessSandbox):
    networks = frozenset()


SANDBOXES: dict[Callable[..., Any], set[str]] = {
    SharesItsEnvironment: {"environment"},
    ErrorsAmongOutput: {"streams"},
    PrintsTwiceAsMuch: {"limits"},
    WorksInPlace: {"inputs"},
    HoldsToNothing: {"refuses"},
    SaysAnotherHome: {"directories"},
    SharesItsFiles: {"at once"},
    LeavesAHelper: {"leaves nothing running", "stops"},
    with_programs(AsShellsCount): {"exits"},
    with_programs(NotStopped): {"stops"},
    with_programs(GoneTooSoon): {"what it left"},
    with_programs(EndsWell): {"closes what runs"},
    NeverStarts: {"opens"},
    NamesNoNetwork: {"opens"},
}
