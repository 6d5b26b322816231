"""The folders that a command needs if most of the disk is hidden: that of its program, and that of the program's interpreter."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

PARTS = (
    "bin",
    "lib",
    "lib64",
    "libexec",
    "include",
    "share/uv",
    "pipx",
    "share/pipx",
)  # in a prefix that contains more than programs


def needed_by(argv: Sequence[str], path: str, kept_from: Sequence[Path] = ()) -> list[Path]:
    """Existing folders and files: the installations of the program, and of the interpreters that its first lines name; and files
    that its arguments name by an absolute path. All of them are shown to the program, so `argv` must not contain a word from a task.
    If a folder holds one of `kept_from`, only the program itself is returned, whatever is installed there."""
    program, *arguments = argv or [""]
    named = (Path(word) for word in arguments if os.path.isabs(word) and os.path.isfile(word))
    kept = [os.path.realpath(one) for one in kept_from]
    return list(dict.fromkeys([*_installations(program, path, kept), *named]))


def _installations(program: str, path: str, kept: Sequence[str], depth: int = 3) -> Iterator[Path]:
    where = shutil.which(program, path=path)
    if where is None or depth == 0 or not os.path.isabs(where):
        return  # it is in the work directory, or starting it will fail and say so
    at = Path(os.path.normpath(where))
    while True:
        yield from [one for one in _prefix(at) if not _holds(one, kept)] or [at]
        if not at.is_symlink():
            break
        at = Path(os.path.normpath(at.parent / os.readlink(at)))
    with at.open("rb") as file:
        first = file.readline(500)
    if named := re.match(rb"#!\s*(\S+)(?:\s+(?:-S\s+)?(\S+))?", first):
        interpreter, argument = (part.decode(errors="replace") if part else "" for part in named.groups())
        yield from _installations(
            argument if os.path.basename(interpreter) == "env" and argument else interpreter, path, kept, depth - 1
        )


def _prefix(program: Path) -> Iterator[Path]:
    """For /prefix/bin/name, all of /prefix if it belongs to one installation; else the folder of the program."""
    folder = program.parent
    if folder.name not in ("bin", "sbin"):
        package = next((parent for parent in folder.parents if parent.name == "node_modules"), None)
        yield package or folder
        return
    prefix = folder.parent
    if prefix in (Path("/"), Path.home(), Path.home() / ".local"):
        yield from (prefix / part for part in PARTS if (prefix / part).is_dir())
    else:
        yield prefix


def _holds(folder: Path, kept: Sequence[str]) -> bool:
    """True if the folder is one of `kept`, or contains one."""
    return any(Path(one).is_relative_to(os.path.realpath(folder)) for one in kept)
