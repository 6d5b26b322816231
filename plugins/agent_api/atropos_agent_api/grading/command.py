"""A reward by command: a program that reads the case on standard input and prints the score as its last line.

It starts in an empty directory with an empty HOME. The files that the agent's program left are elsewhere, and are only data:
interpreters and tools do not find modules, configurations or hooks there unless they are told to.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atropos_agent_api.grading.case import Case, read_score
from atropos_agent_api.grading.graders import Grader
from atropos_agent_api.sandboxes.installations import needed_by
from atropos_agent_api.sandboxes.streams import tail
from atropos_agent_api.templates import fill, fixed
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded
from atropos_core.sandboxes import Limits, Network, Program, Sandbox
from atropos_core.storage.tempdirs import owned_prefix
from atropos_core.types import Episode, Score

OUTPUT_BYTES = 1 << 20
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # Python does not import from the files, even if a grader changes to their directory
    "PYTHONNOUSERSITE": "1",
    "GIT_TEST_ASSUME_DIFFERENT_OWNER": "1",  # git refuses their repository, whose configuration can name programs
}


class CommandGrader(Grader):
    """Runs in the kind of sandbox that the program had, but in none of its directories. `own`: the sandbox, if this grader opens
    and closes it."""

    reads_files = True

    def __init__(
        self,
        command: Sequence[str],
        sandbox: Sandbox,
        here: Path,
        deadline_s: float,
        own: Sandbox | None = None,
        inputs_bytes: int = 0,
    ) -> None:
        """`inputs_bytes`: the most that a program may leave."""
        self._command = command
        self._sandbox = sandbox
        self._here = here
        self._deadline_s = deadline_s
        self._own = own
        self._limits = Limits(
            wall_time_s=deadline_s, output_bytes=OUTPUT_BYTES, disk_bytes=inputs_bytes + Limits().disk_bytes
        )
        self._digests: dict[Path, str] = {}
        self._fixed: list[str] = []  # the command's words that are the same in each episode; "" for the others

    async def open(self) -> None:
        if self._own is not None:
            await self._own.open()
        values = {"here": str(self._here), "python": sys.executable}
        self._fixed = [fixed(text, values) for text in self._command]
        self._refuse_relative()
        for path in self._files():
            self._digests[path] = _digest(path)

    def _files(self) -> list[Path]:
        """The files that the command names and that exist."""
        return [Path(word) for word in self._fixed if os.path.isabs(word) and os.path.isfile(word)]

    def _refuse_relative(self) -> None:
        """Raises ConfigError for a word that names a file in `here`: the grader starts elsewhere, and would not find it."""
        for at, word in enumerate(self._fixed):
            names_path = os.sep in word if at == 0 else bool(word)
            if names_path and not os.path.isabs(word) and os.path.isfile(self._here / word):
                raise ConfigError(
                    f"reward.command[{at}] names the file {word!r}, but a reward by command starts in an empty directory.",
                    remedy=f'Write "{{here}}/{os.path.normpath(word)}" for the file in {self._here}.',
                )

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()

    async def score(self, case: Case, episode: Episode) -> Score:
        for path, digest in self._digests.items():
            if _digest(path) != digest:
                raise ConfigError(
                    f"{path}, which grades, has changed since the run began: a program that is trained may have changed it.",
                    remedy="Put it where programs cannot write, or use a sandbox: bubblewrap, docker.",
                )
        network: Network = "none" if "none" in self._sandbox.networks else "host"
        name = f"grader-{secrets.token_hex(8)}"
        inside = self._sandbox.inside(name, "", network)
        values = {"here": str(self._here), "python": sys.executable, "work": inside.inputs, "home": inside.home}
        folders = dict.fromkeys(str(path.parent) for path in self._files() if path.suffix == ".py")
        with tempfile.TemporaryDirectory(prefix=owned_prefix("agent-grading")) as directory:
            stdout, stderr = Path(directory) / "stdout.txt", Path(directory) / "stderr.txt"
            running = await self._sandbox.start(
                Program(
                    name=name,
                    argv=[fill(text, values) for text in self._command],
                    stdout=stdout,
                    stderr=stderr,
                    environment={
                        **ENVIRONMENT,
                        "PATH": _absolute(os.environ.get("PATH", os.defpath)),
                        **({"PYTHONPATH": os.pathsep.join(folders)} if folders else {}),
                    },
                    stdin=json.dumps({**case.record(), "work": inside.inputs}).encode(),
                    inputs=case.work,
                    shown=needed_by(self._fixed, os.environ.get("PATH", os.defpath)),
                    network=network,
                    limits=self._limits,
                )
            )
            try:
                ended = await running.wait()
            finally:
                await running.close()
            if ended.limit == "wall_time":
                raise DeadlineExceeded(f"the reward {self._command[0]!r} gave no answer within {self._deadline_s:g} s")
            if ended.code != 0:
                last = tail(stderr).splitlines()[-1:]
                how = f"exit code {ended.code}" if ended.limit is None else f"its limit of {ended.limit}"
                raise DataError(
                    f"the reward {self._command[0]!r} ended with {how}: {last[0] if last else 'it wrote nothing'}"
                )
            return _last_line(tail(stdout), self._command[0])


def _absolute(path: str) -> str:
    """PATH without relative entries. An empty entry, or ".", would be the grader's directory, in which the program may have left
    a `python`."""
    return os.pathsep.join(one for one in path.split(os.pathsep) if os.path.isabs(one)) or os.defpath


def _last_line(printed: str, command: str) -> Score:
    lines = printed.splitlines()
    try:
        given = json.loads(lines[-1]) if lines else None
    except ValueError:
        given = lines[-1]
    return read_score(given, f"the reward {command!r}, as its last line,")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
