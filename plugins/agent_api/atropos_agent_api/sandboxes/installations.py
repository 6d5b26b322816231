"""Which folders a command needs to be seen by, where little of the disk is: that of its program, and of what interprets it."""

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
)  # of a prefix that holds more than programs


def needed_by(argv: Sequence[str], path: str, kept_from: Sequence[Path] = ()) -> list[Path]:
    """Folders and files that exist: the installations of the program, and of the interpreters that its first lines name; files
    that are named by an absolute path among its arguments. All of them are shown to the program, so `argv` must not have a word
    from a task. Of a folder that holds one of `kept_from`, only the program is returned, whatever is installed there."""
    program, *arguments = argv or [""]
    named = (Path(word) for word in arguments if os.path.isabs(word) and os.path.isfile(word))
    kept = [os.path.realpath(one) for one in kept_from]
    return list(dict.fromkeys([*_installations(program, path, kept), *named]))


def _installations(program: str, path: str, kept: Sequence[str], depth: int = 3) -> Iterator[Path]:
    where = shutil.which(program, path=path)
    if where is None or depth == 0 or not os.path.isabs(where):
        return  # it lies in the work directory, or its start will say that there is none
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
    """Of /prefix/bin/name all of /prefix, if that is an installation's own; elsewhere the folder that the program lies in."""
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
    """Or is one of them."""
    return any(Path(one).is_relative_to(os.path.realpath(folder)) for one in kept)
