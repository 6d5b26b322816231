"""Files of an episode that stay in the run's directory: the program's standard streams, and the fate of each token."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from atropos_core.errors import RunDirectoryError

TAIL_BYTES = 2000  # of a program's output, in an error


class KeptStreams:
    """A folder for each of the last `most` episodes: `000017-TASK/`, with stdout.txt, stderr.txt and account.json."""

    def __init__(self, directory: Path, most: int) -> None:
        self._directory = directory
        self._most = most
        self._number = 0

    def open(self) -> None:
        """Continue after the folders of a resumed run. Raises RunDirectoryError."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise RunDirectoryError(f"{self._directory} cannot be made: {error.strerror}.") from error
        numbers = [int(path.name[:6]) for path in self._directory.iterdir() if re.match(r"\d{6}-", path.name)]
        self._number = max(numbers, default=-1) + 1

    def begin(self, task: str) -> Path:
        """A new folder."""
        path = self._directory / f"{self._number:06d}-{re.sub(r'[^A-Za-z0-9_-]+', '-', task)[:40]}"
        self._number += 1
        path.mkdir(mode=0o700)
        return path

    def end(self, path: Path) -> None:
        """Called when the episode has ended: its folder stays until `most` newer ones exist."""
        if not self._most:
            shutil.rmtree(path, ignore_errors=True)
            return
        oldest = int(path.name[:6]) - self._most
        for old in self._directory.glob(f"{oldest:06d}-*") if oldest >= 0 else ():
            shutil.rmtree(old, ignore_errors=True)


def tail(path: Path) -> str:
    """The end of a program's output."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
