"""The contract of a sandbox: a program starts in its own directories, its limits are enforced, and it leaves nothing behind.

The programs are for `sh`, so that an image without Python can be checked too. Processes that they leave running are found by a word
among their arguments, only on this machine. Not tested: that a program ends when our process is killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from atropos_core.errors import ConfigError, SandboxError
from atropos_core.sandboxes import Exit, Limits, Network, Program, RunningProgram, Sandbox
from atropos_testing.stages import StagedContract

MB = 1 << 20
FIRST_DEADLINE_S = 60.0  # for the first program of all: without it nothing else can be checked
ENDS_WITHIN_S = 10.0  # over a program's wall time, and of `stop`
LIMITS = Limits(wall_time_s=30.0)
SECRET = "ATROPOS_CHECK_SECRET"
ASIDE = 'sh -c "sleep 57; :" "$0" & (trap "" TERM HUP; sleep 58) & setsid sh -c "sleep 59; :" "$0" 2>/dev/null & '
SPENT: dict[str, tuple[Limits, str]] = {  # of a limit: the bound, and what goes beyond it
    "wall_time": (replace(LIMITS, wall_time_s=1.0), "trap '' TERM INT HUP; sleep 40"),
    "output": (replace(LIMITS, output_bytes=100_000), "while :; do echo 0123456789012345678901234567890123456789; done"),
    "processes": (replace(LIMITS, processes=20), "i=0; while [ $i -lt 60 ]; do sleep 40 & i=$((i+1)); done; wait"),
    "memory": (replace(LIMITS, memory_bytes=64 * MB), "{ head -c 100000000 /dev/zero; sleep 40; } | tail -c 95000000 | sleep 40"),
    "disk": (replace(LIMITS, disk_bytes=20 * MB), "head -c 80000000 /dev/zero > big; sleep 40"),
}  # fmt: skip


class SandboxContract(StagedContract):
    """Checks one sandbox with programs of a few words."""

    made: Sandbox
    stages = {  # noqa: RUF012 - ClassVar of the base
        "directories": (
            "its own work directory and HOME, with the given files, as inside() says",
            "The program starts in inside(...).work with Program.files there, home_files in HOME, and stdin as its input.",
        ),
        "environment": (
            "the program's variables, and none of this process's",
            "Set Program.environment, HOME, TMPDIR, PATH and LANG, but nothing else of this process's environment, which has keys.",
        ),
        "streams": ("standard output and error in a file each", "Program.stdout and Program.stderr are files that you make anew."),
        "exits": ("the code, or the signal, that ended it", "Exit.code is what it exited with; a signal is Exit.signal, and code None."),
        "limits": (
            "each of the five ends a program that reaches it, and is named",
            "Whatever reaches a limit is ended, and Exit.limit names it; the streams together never exceed output_bytes.",
        ),
        "leaves nothing running": (
            "what a program leaves in the background ends with it",
            "When wait() returns, none of its processes is left: those with another session or parent neither.",
        ),
        "stops": ("at once, with all that it started", "stop() ends every process of it, returns then, and Exit.stopped says so."),
        "what it left": (
            "its work directory, until close(); the two files stay",
            "work() gives the directory as it was left. close() removes it, may be called twice, and leaves stdout and stderr.",
        ),
        "inputs": (
            "a copy of the directory that was named, outside its work directory, which begins empty",
            "Copy Program.inputs to where inside(...).inputs says; links stay links. Never start a program there.",
        ),
        "refuses": (
            "what is not there, what reaches out, and a network that it cannot enforce",
            "start() raises SandboxError if the program does not exist, ConfigError for a file outside of the program's "
            "directories and for a network that is not among `networks`.",
        ),
        "at once": ("programs with different names are separate", "Each program has its own directories, and ends separately."),
        "closes what runs": (
            "close() of the sandbox ends its programs",
            "close() ends what still runs; a pending wait() raises SandboxError.",
        ),
    }  # fmt: skip

    async def open(self) -> Sequence[str]:
        """Also start a first program, without which there is nothing to check."""
        await super().open()
        if not self.made.networks:
            return ["networks is empty once it is open: it says to which networks a program can be held"]
        self.network: Network = next(name for name in ("none", "host", "api") if name in self.made.networks)
        self.streams = Path(mkdtemp(dir=self.subject.context.directory))
        try:
            async with asyncio.timeout(FIRST_DEADLINE_S):
                ended, _ = await self._run("exit 0")
        except TimeoutError:
            return [f"a first program, `sh -c 'exit 0'`, did not end within {FIRST_DEADLINE_S:g} s"]
        return [] if ended.code == 0 else [f"a first program, `sh -c 'exit 0'`, ended with {ended}"]

    async def check_directories(self) -> Sequence[str]:
        text = 'pwd; echo "$HOME"; cat notes/a.txt "$HOME/.agent"; cat; test -d "$TMPDIR" && echo temporary'
        _, printed = await self._run(
            text, files={"notes/a.txt": b"file\n"}, home_files={".agent": b"home\n"}, stdin=b"input\n"
        )
        inside = self.made.inside("check", "", self.network)
        wanted = [inside.work, inside.home, "file", "home", "input", "temporary"]
        got = printed.splitlines()
        return [] if got == wanted else [f"it printed {got!r:.300}, and should have printed {wanted!r:.300}"]

    async def check_environment(self) -> Sequence[str]:
        os.environ[SECRET] = "ours"
        try:
            _, printed = await self._run(f'echo "$MINE ${{{SECRET}-}}"', environment={"MINE": "own"})
        finally:
            del os.environ[SECRET]
        mine, _, ours = printed.strip("\n").partition(" ")
        return [
            *([] if mine == "own" else [f"a variable that it was given is {mine!r:.40} there, not 'own'"]),
            *(["a variable of this process reached it"] if ours else []),
        ]

    async def check_streams(self) -> Sequence[str]:
        wanted = self._program("echo out; echo err >&2")
        wanted.stdout.write_text("of an earlier program, and longer\n")
        await self._end(wanted)
        found = wanted.stdout.read_text(errors="replace"), wanted.stderr.read_text(errors="replace")
        return [] if found == ("out\n", "err\n") else [f"stdout has {found[0]!r:.80}, stderr {found[1]!r:.80}"]

    async def check_exits(self) -> Sequence[str]:
        wrong = []
        for text, code, signal in (("exit 7", 7, None), ("kill -SEGV $$", None, 11)):
            ended, _ = await self._run(text)
            if (ended.code, ended.signal) != (code, signal) or ended.limit or ended.stopped:
                wrong.append(f"`{text}` gave {ended}")
        return wrong

    async def check_limits(self) -> Sequence[str]:
        wrong = []
        for number, (limit, (bounds, text)) in enumerate(SPENT.items()):
            wanted = self._program(text, name=f"limit-{number}", limits=bounds)
            try:
                ended, _ = await self._end(wanted)
            except TimeoutError as error:
                wrong.append(f"{limit}: {error}")
                continue
            if ended.limit != limit:
                wrong.append(f"{limit}: a program that went beyond it gave {ended}")
            size_bytes = wanted.stdout.stat().st_size + wanted.stderr.stat().st_size
            if size_bytes > bounds.output_bytes:
                wrong.append(f"{limit}: its streams have {size_bytes} bytes, of {bounds.output_bytes} at most")
        return wrong

    async def check_leaves_nothing_running(self) -> Sequence[str]:
        mark = _mark()
        ended, _ = await self._run(f"{ASIDE}sleep 0.3; exit 0", mark=mark)
        return [
            *([] if ended.code == 0 else [f"it gave {ended}, though it exited by itself"]),
            *([f"{len(left)} processes of it are left"] if (left := _running(mark)) else []),
        ]

    async def check_stops(self) -> Sequence[str]:
        mark = _mark()
        running, wanted = await self._started(f"{ASIDE}echo up; sleep 56", mark=mark)
        try:
            await _printed(wanted, "up")
            async with asyncio.timeout(ENDS_WITHIN_S):
                await running.stop()
                ended = await running.wait()
                await running.stop()
        except TimeoutError:
            return [f"stop() did not end it within {ENDS_WITHIN_S:g} s"]
        finally:
            await running.close()
        return [
            *([] if ended.stopped and ended.limit is None else [f"it gave {ended}"]),
            *([f"{len(left)} processes of it are left"] if (left := _running(mark)) else []),
        ]

    async def check_what_it_left(self) -> Sequence[str]:
        running, wanted = await self._started("echo 42 > answer.txt; echo said")
        wrong = []
        work = await running.work()
        if not (work / "answer.txt").is_file() or (work / "answer.txt").read_text() != "42\n":
            wrong.append("a file that it wrote is not in work()")
        await running.close()
        await running.close()
        if work.exists():
            wrong.append("its work directory is there after close()")
        if not wanted.stdout.is_file() or wanted.stdout.read_text() != "said\n":
            wrong.append("its standard output is gone with close()")
        return wrong

    async def check_inputs(self) -> Sequence[str]:
        given = Path(mkdtemp(dir=self.subject.context.directory))
        (given / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (given / "run.sh").chmod(0o755)
        (given / "link").symlink_to("run.sh")
        inside = self.made.inside("check", "", self.network)
        at = inside.inputs
        text = f"ls -A; cd {shlex.quote(at)}; ./link; readlink link; echo more > new; echo less > run.sh"
        _, printed = await self._run(text, inputs=given)
        changed = (given / "new").exists() or "ran" not in (given / "run.sh").read_text()
        apart = all(
            not f"{one}/".startswith(f"{at}/") and not f"{at}/".startswith(f"{one}/")
            for one in (inside.work, inside.home)
        )
        return [
            *(
                []
                if at and apart
                else [f"inside() says that the copy is {at or 'nowhere'}, and the work directory {inside.work}"]
            ),
            *([] if printed == "ran\nrun.sh\n" else [f"it printed {printed!r:.80} there, not 'ran\\nrun.sh\\n'"]),
            *(["the directory itself was changed"] if changed else []),
        ]

    async def check_refuses(self) -> Sequence[str]:
        wanted = self._program("exit 0")
        others: list[Network] = [name for name in ("none", "api", "host") if name not in self.made.networks]
        wrong = await self._refused(
            "a program that is not there", replace(wanted, argv=["no-such-program-1"]), SandboxError
        )
        wrong += await self._refused("a file outside", replace(wanted, files={"../out": b""}), ConfigError)
        for network in others[:1]:
            odd = replace(wanted, network=network, api_url="http://127.0.0.1:9/" if network == "api" else "")
            wrong += await self._refused(f'network "{network}"', odd, ConfigError)
        return wrong

    async def check_at_once(self) -> Sequence[str]:
        async def one(number: int) -> str:
            ended, printed = await self._run(
                f"echo {number} > mine; sleep 0.2; cat mine; ls | wc -l; exit {number}", name=f"once-{number}"
            )
            right = ended.code == number and printed.split() == [str(number), "1"]
            return "" if right else f"program {number} of 4 printed {printed.split()!r:.60} and gave {ended.code}"

        return [wrong for wrong in await asyncio.gather(*map(one, range(4))) if wrong]

    async def check_closes_what_runs(self) -> Sequence[str]:
        mark = _mark()
        other: Any = await self.opened()
        running = None
        try:
            wanted = self._program(f"{ASIDE}echo up; sleep 56", mark=mark)
            running = await other.start(wanted)
            await _printed(wanted, "up")
            waiting = asyncio.ensure_future(running.wait())
            await other.close()
            await asyncio.wait({waiting}, timeout=ENDS_WITHIN_S)
        finally:
            await other.close()
        wrong = [f"{len(left)} processes of it are left"] if (left := _running(mark)) else []
        if not waiting.done():
            waiting.cancel()
            return [*wrong, f"wait() was still pending {ENDS_WITHIN_S:g} s later"]
        if not isinstance(waiting.exception(), SandboxError):
            wrong.append("wait() raised no SandboxError, as if the program had ended normally")
        return wrong

    # -- inside

    def _program(self, text: str, *, name: str = "check", mark: str = "", **more: Any) -> Program:
        files = {"stdout": self.streams / f"{name}.stdout", "stderr": self.streams / f"{name}.stderr"}
        settings: dict[str, Any] = {"network": self.network, "limits": LIMITS, **files, **more}
        return Program(name, ["sh", "-c", text, *([mark] if mark else [])], **settings)

    async def _started(self, text: str, **more: Any) -> tuple[RunningProgram, Program]:
        wanted = self._program(text, **more)
        return await self.made.start(wanted), wanted

    async def _run(self, text: str, **more: Any) -> tuple[Exit, str]:
        return await self._end(self._program(text, **more))

    async def _end(self, wanted: Program) -> tuple[Exit, str]:
        """Return how it ended, and what it printed. Raises TimeoutError well after its wall time."""
        async with _closed(await self.made.start(wanted)) as running:
            bound_s = wanted.limits.wall_time_s + ENDS_WITHIN_S
            try:
                async with asyncio.timeout(bound_s):
                    ended = await running.wait()
            except TimeoutError:
                raise TimeoutError(
                    f"a program with a wall time of {wanted.limits.wall_time_s:g} s still ran {bound_s:g} s later"
                ) from None
            return ended, wanted.stdout.read_text(errors="replace")

    async def _refused(self, what: str, wanted: Program, error: type[Exception]) -> list[str]:
        try:
            async with _closed(await self.made.start(wanted)) as running:
                return [f"{what} was not refused: {await running.wait()}"]
        except (ConfigError, SandboxError) as raised:
            return (
                []
                if isinstance(raised, error)
                else [f"{what}: {type(raised).__name__}, not {error.__name__}: {raised}"]
            )


@asynccontextmanager
async def _closed(running: RunningProgram) -> AsyncIterator[RunningProgram]:
    try:
        yield running
    finally:
        await running.close()


async def _printed(wanted: Program, word: str) -> None:
    """Return once its standard output contains this word. Raises TimeoutError."""
    async with asyncio.timeout(ENDS_WITHIN_S):
        while not wanted.stdout.exists() or word not in wanted.stdout.read_text(errors="replace"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def _mark() -> str:
    return f"atropos-check-{secrets.token_hex(8)}"


def _running(mark: str) -> list[int]:
    """Return processes of this machine with this word among their arguments."""
    if not os.path.isdir("/proc/self"):
        listed = subprocess.run(["ps", "-axwwo", "pid=,args="], capture_output=True, text=True, timeout=60, check=True)
        return [int(line.split()[0]) for line in listed.stdout.splitlines() if mark in line]
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and mark.encode() in _arguments(name)]


def _arguments(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
