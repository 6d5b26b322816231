"""Read files of a run directory, which may be damaged: a pipe instead of a file, half a line, numbers beyond float range."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from atropos_core.errors import ConfigError

KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}  # fmt: skip


def open_file(path: Path, *, append: bool = False) -> IO[bytes]:
    """Open a regular file for reading. With `append`, create it if needed, and open it for reading and appending. Raises OSError,
    with `strerror` set. A pipe or device is an error, like a directory, and is not waited for."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY
    try:
        descriptor = os.open(
            path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666
        )  # a pipe would be waited for
    except ValueError as error:  # a name with NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}", str(path))
    return open(descriptor, "a+b" if append else "rb")


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError like `open_file`, and for a file that does not fit in memory."""
    with open_file(path) as file:
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, "it is larger than the memory of this machine", str(path)) from None


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file, with or without a byte order mark. Raises OSError, and ValueError for other bytes."""
    return read_file(path).decode("utf-8-sig")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for a text that is nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises OSError as `open_file`, and ValueError for anything but an object."""
    found = parse_json(read_text(path))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__} and not an object")
    return found


def base_of_adapter(directory: Path) -> Path:
    """Return the base model that the directory of a peft adapter names. Raises ConfigError."""
    path = directory / "adapter_config.json"
    try:
        base = json_object(path).get("base_model_name_or_path")
        why = f"base_model_name_or_path is {base!r:.100}"
    except (OSError, ValueError) as error:
        base, why = None, str(error)
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path} does not name the adapter's base model: {why}.",
            remedy="Write the place of the base model into it, or name a whole model.",
        )
    return Path(base)


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ValueError, also for a text that is nested too deep for Python."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def numbered(folder: Path, prefix: str, suffix: str = "") -> list[tuple[int, Path]]:
    """Return (step, path) of files and folders that are named after a step, like `step-000001.jsonl`, in ascending order. Skips
    other names."""
    name = re.compile(rf"{re.escape(prefix)}([0-9]{{6,18}}){re.escape(suffix)}")
    return sorted((int(found[1]), path) for path in _listed(folder) if (found := name.fullmatch(path.name)))


def _listed(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder; none if it does not exist or cannot be read."""
    try:
        yield from folder.iterdir()
    except OSError:
        return
