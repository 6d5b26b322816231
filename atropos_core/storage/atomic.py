"""Write directories and files so that they exist whole or not at all, and name the error if that fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from atropos_core.errors import RunDirectoryError

BLOCK_BYTES = 1 << 16  # read at once to find the end of a line
WRITABLE = "See that its disk has room, and that this user may write there."


@contextmanager
def appearing(directory: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a directory to fill. After the block it replaces any directory of that name, and is on the disk. After an exception or
    a kill inside the block there is none of that name; an unfinished one starts with a dot and ends in `.partial`. Without
    `durable` this holds for killed processes but not for a power cut: data that is read at once and then deleted need not wait
    for the disk."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        for path in (*partial.rglob("*"), partial) if durable else ():
            sync(path)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        if durable:
            sync(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file by one with all of `content`. A reader finds either the old or the new content, also after a kill, but not
    after a power cut, since it does not wait for the disk. `mode` is that of `os.open`. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines. If a killed process left an unfinished line, end it first, so that only that line is lost. Raises
    OSError."""
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            file.write(b"\n")
        file.writelines(json_bytes(f"{line}\n") for line in lines)


def cut_back(file: IO[bytes], size_bytes: int) -> None:
    """Cut a file of lines to `size_bytes`, or to the last whole line before that, and write from there on. Raises OSError."""
    end = min(file.seek(0, os.SEEK_END), size_bytes)
    while end:
        start = max(end - BLOCK_BYTES, 0)
        if (last := os.pread(file.fileno(), end - start, start).rfind(b"\n")) >= 0:
            end = start + last + 1
            break
        end = start
    file.seek(file.truncate(end))


def refuse_existing(*paths: Path, what: str = "file") -> None:
    """Raises RunDirectoryError for a path that exists, so that an output never overwrites something."""
    for path in paths:
        if path.exists():
            raise RunDirectoryError(f"{path} is there already.", remedy=f"Name another {what}, or remove it.")


def write_output(path: Path, text: str) -> None:
    """Write a command's output, which is JSON, and make its folder. Raises RunDirectoryError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_bytes(text))
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error.strerror}.", remedy="Free some space, or name another place."
        ) from error


def json_bytes(text: str) -> bytes:
    """Encode JSON in UTF-8. Half a surrogate pair, which a reply may contain and UTF-8 cannot encode, is escaped."""
    return text.encode(errors="backslashreplace")


def size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Return once a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a sink whose file could not be written."""
    full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return RunDirectoryError(
        f"{path} cannot be written: {full}.",
        remedy=f"{WRITABLE} What was saved is intact, and `atropos resume` continues from it.",
    )
