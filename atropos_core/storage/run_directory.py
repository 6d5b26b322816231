"""The directory of a run: it is made, locked while the run lasts, and never used by two runs."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atropos_core.console import quoted
from atropos_core.errors import RunDirectoryError
from atropos_core.storage.atomic import WRITABLE, write_whole
from atropos_core.storage.checkpoint import Checkpoints
from atropos_core.storage.file_permissions import make_private
from atropos_core.storage.reading import open_file, read_file

FOLDERS = ("checkpoints", "logs", "rollouts")
PATHS = "paths.json"  # which way of computing the model each engine and trainer takes, and why
BEFORE_IT_BEGINS = (
    "config.toml",
    "health.jsonl",
    "lock",
    "metrics.jsonl",
    PATHS,
)  # its files before anything is measured


class RunDirectory:
    """A directory of a run, or for one. Nothing is made or read before it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "config.toml"  # as the run resolved it
        self.checkpoints = Checkpoints(path / "checkpoints")
        self._lock = path / "lock"
        self._folders = [path / name for name in FOLDERS]

    @classmethod
    def for_new_run(cls, path: Path | None, name: str) -> RunDirectory:
        """Return the one at `path`. Without a path, return `runs/NAME-20260131-235959`, which does not exist yet."""
        if path is not None:
            return cls(path)
        parent = Path("runs")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            directory = parent / f"{name}-{stamp}{suffix}"
            if not directory.exists():
                return cls(directory)
        raise RunDirectoryError(f"{parent} has a hundred runs of this second.")

    def make(self) -> Path:
        """Make an empty directory for a new run, private to its user, and return its path."""
        try:
            make_private(self.path)
            self.refuse_used()
            for name in BEFORE_IT_BEGINS:  # left by a run that never began
                if name != "lock":
                    (self.path / name).unlink(missing_ok=True)
            for folder in self._folders:
                make_private(folder)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be made: {error.strerror}.", remedy="Choose another with --dir."
            ) from error
        return self.path

    def remove_if_empty(self) -> None:
        """Remove what `make` made for a run that did not begin."""
        with suppress(OSError):  # something is in it
            for made in (*self._folders, self.path):
                made.rmdir()

    def refuse_unmakeable(self) -> None:
        """Raises RunDirectoryError if this machine cannot make the directory."""
        whole = self.path.absolute()
        nearest = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            why = "cannot be written to" if nearest.is_dir() else "is not a directory"
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be made: {nearest} {why}.", remedy="Choose another with --dir."
            )

    def refuse_used(self) -> None:
        """Raises RunDirectoryError if the directory holds a run's results, or files that are not of a run."""
        if self.is_locked():
            raise RunDirectoryError(self._running(), remedy="Choose another directory, or wait until that run ends.")
        if self.path.exists() and any(self.path.iterdir()) and not self.never_began():
            raise RunDirectoryError(
                f"{self.path} is not empty.",
                remedy=f"Choose another, or continue the run in it: atropos resume {quoted(self.path)}",
            )

    def require_run(self) -> None:
        """Raises RunDirectoryError if no run was made here."""
        if not self.holds_run():
            raise RunDirectoryError(
                f"{self.path} is not a run directory: it has no config.toml.", remedy="`ls -t runs` shows the newest."
            )

    def holds_run(self) -> bool:
        return self.run_file.is_file()

    def never_began(self) -> bool:
        """True if the directory holds only what a run leaves that ended before its first evaluation or step, and no process uses
        it."""
        ours = {*FOLDERS, *BEFORE_IT_BEGINS}
        if not self.holds_run() or not {one.name for one in self.path.iterdir()} <= ours:
            return False
        metrics = self.path / "metrics.jsonl"
        measured = metrics.exists() and metrics.stat().st_size > 0
        if measured or any(any(folder.glob("*")) for folder in self._folders if folder.name != "logs"):
            return False
        # Without a lock file no run has been here, and config.toml is the user's own.
        return self._lock.is_file() and not self.is_locked()

    def is_locked(self) -> bool:
        """True if a process runs the run."""
        try:
            if self._lock.is_file():
                with open_file(self._lock) as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def process_id(self) -> int | None:
        """Return the process that last locked the directory; None if that is not recorded."""
        try:
            return int(read_file(self._lock))
        except (OSError, ValueError):
            return None

    def _running(self) -> str:
        """Say that another process runs the run."""
        number = self.process_id()
        return f"{self.path} is in use: its run is running now{'' if number is None else f', in process {number}'}."

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory, so that a running run cannot be resumed. Raises RunDirectoryError if it is locked, and if another user
        could redirect what is written here."""
        try:
            for each in (self.path, *self._folders):
                make_private(each)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be used: {error.strerror}.",
                remedy="Use one that only you can write to.",
            ) from error
        try:
            file = open_file(self._lock, append=True)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be written: {error.strerror}.", remedy=WRITABLE
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunDirectoryError(
                    self._running(), remedy="Wait until it ends, or stop it, before you resume it."
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
            file.flush()
            yield

    def write(self, name: str, text: str) -> None:
        """Write a file as a whole. Raises RunDirectoryError."""
        path = self.path / name
        try:
            write_whole(path, text)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error.strerror}.", remedy=WRITABLE) from error
