"""The server's directory: one server at a time, and one base model for all its life."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_core.storage.atomic import write_whole
from atropos_core.storage.file_permissions import make_private

SERVER = "server.json"


class ServerDirectory:
    """Locked while it is open. `close` unlocks it."""

    def __init__(self, path: Path, model: Path) -> None:
        """Raises RunDirectoryError, and ConfigError if another model was served from here."""
        self.path = path
        self.sessions, self.models, self.samplers = (path / name for name in ("sessions", "models", "samplers"))
        try:
            make_private(path)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for folder in (self.sessions, self.models, self.samplers, path / "logs"):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"the server's directory {path} cannot be used: {error.strerror}.", remedy="Choose another with --dir."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunDirectoryError(
                f"another server uses {path}.", remedy="End it, or choose another directory with --dir."
            ) from None
        self._check_model(model)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_model(self, model: Path) -> None:
        file, here = self.path / SERVER, str(model)
        before = read_json(file).get("model") if file.is_file() else None
        if before is not None and before != here:
            self.close()
            raise ConfigError(
                f"{self.path} has adapters of the model {before}, and --model is {here}.",
                remedy="Serve that model, or choose another directory with --dir.",
            )
        write_json(file, {"model": here})


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote. Raises RunDirectoryError."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}.", remedy="Restore it, or remove it.") from error
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} is not a JSON object.", remedy="Restore it, or remove it.")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a file whole. Raises RunDirectoryError."""
    try:
        write_whole(path, json.dumps(value, indent=1, ensure_ascii=True) + "\n", mode=0o600)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}.", remedy="Free some space.") from error
