"""The sandbox `external` starts nothing. A program that the user starts elsewhere takes the episode, and reports its end.

The user who starts that program decides what it may do. Atropos only limits its time, its session's calls and tokens, and how much
of its report is kept.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from atropos_agent_api.sandboxes.config import ExternalOptions
from atropos_agent_api.sandboxes.episode_queue import EpisodeQueue, QueuedEpisode, Report
from atropos_core import console
from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_core.sandboxes import Exit, Inside, Network, Program, RunningProgram, Sandbox
from atropos_core.storage.tempdirs import owned_prefix, sweep
from atropos_http_server.tokens import make_token_file, read_server_token

ROLE = "external"
ANYWHERE = ("0.0.0.0", "::")
TAKER = Path(__file__).parent.parent / "examples" / "take_episodes.py"


class ExternalSandbox(Sandbox):
    """`token_file` is created if the options do not name one."""

    networks: frozenset[Network] = frozenset({"host"})

    def __init__(self, options: ExternalOptions, token_file: Path) -> None:
        """Raises ConfigError for a token file that cannot be used."""
        self.host, self.port = options.host, options.port
        self.token_file = options.token_file or token_file
        self.token = b""
        self.queue = EpisodeQueue(options.patience_s)
        self._makes_token = options.token_file is None
        self._folder: Path | None = None

    async def open(self) -> None:
        if self._makes_token:
            try:
                self.token_file.parent.mkdir(parents=True, exist_ok=True)
                make_token_file(self.token_file)
            except OSError as error:
                raise RunDirectoryError(
                    f"the token file {self.token_file} cannot be made: {error.strerror}."
                ) from error
        self.token = read_server_token(self.token_file)
        sweep(ROLE)
        self._folder = Path(tempfile.mkdtemp(prefix=owned_prefix(ROLE)))

    def announce(self, url: str) -> None:
        """Print the address of the episodes, for the user who starts the run."""
        from_elsewhere = self.host in ANYWHERE
        url = (
            url.replace(f"//{self.host}:", "//127.0.0.1:").replace(f"//[{self.host}]:", "//[::1]:")
            if from_elsewhere
            else url
        )
        more = ", and by this machine's name from elsewhere," if from_elsewhere else ""
        token = console.quoted(self.token_file)
        console.say(f"episodes are offered at {url}{more} to programs that have the token")
        console.facts(
            [
                ("token", str(self.token_file)),
                ("curl", f'curl -X POST -H "Authorization: Bearer $(cat {token})" {url}/episodes/next'),
                ("a loop", f"python {console.quoted(TAKER)} {url} {token} your-agent"),
            ]
        )

    def inside(self, name: str, api_url: str, network: Network) -> Inside:
        return Inside("", "", api_url)

    async def start(self, program: Program) -> RunningProgram:
        if program.argv:
            raise ConfigError(
                f"{program.argv[0]!r} cannot be started: sandbox external starts nothing.",
                remedy="Use a sandbox that does: local.",
            )
        assert self._folder is not None, "a sandbox is opened before it is used"
        folder = self._folder / program.name
        folder.mkdir()
        return ExternalProgram(program, self.queue, folder)

    async def close(self) -> None:
        self.queue.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class ExternalProgram(RunningProgram):
    """One episode that is offered."""

    def __init__(self, program: Program, queue: EpisodeQueue, folder: Path) -> None:
        self._program = program
        self._queue = queue
        self._folder = folder
        self._queued = QueuedEpisode(secrets.token_urlsafe(18), _episode(program), program.api_url, program.limits)

    async def wait(self) -> Exit:
        ended = await self._queue.end_of(self._queued)
        report, most = self._queued.report or Report(), self._program.limits.output_bytes
        self._program.stdout.write_bytes(
            report.output[:most]
        )  # not in a thread: nothing may happen between the end and the next statement
        self._program.stderr.write_bytes(report.errors[: max(most - len(report.output), 0)])
        return ended

    async def stop(self) -> None:
        self._queue.withdraw(self._queued)

    async def work(self) -> Path:
        await self.wait()
        work = self._folder / "work"
        if not work.exists():
            await asyncio.to_thread(self._write, work)
        return work

    async def close(self) -> None:
        self._queue.withdraw(self._queued)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _write(self, work: Path) -> None:
        """Write the reported files, up to their limit."""
        work.mkdir()
        left = self._program.limits.disk_bytes
        for path, content in (self._queued.report or Report()).files.items():
            left -= len(content)
            if left < 0:
                break
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(content)


def _episode(program: Program) -> dict[str, Any]:
    """The JSON that the taker gets, without the id."""
    [task] = program.home_files.values()
    return {
        "task": json.loads(task),
        "environment": dict(program.environment),
        "deadline_s": program.limits.wall_time_s,
    }
