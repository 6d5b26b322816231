"""The base of a sink that appends to one file, and resumes after the last step in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from atropos_core.interfaces import Sink
from atropos_core.storage.atomic import unwritable


class FileSink(Sink):
    """A subclass's `open` sets `_file`, and its `step` ends by setting `_last`. At every checkpoint the file is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[Any] | None = None
        self._last = -1  # step

    async def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                raise unwritable(self._path, error) from error

    def state(self) -> Mapping[str, Any]:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"step": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._last = int(state["step"])
