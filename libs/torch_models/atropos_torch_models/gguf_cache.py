"""Model directories that were made from GGUF files, kept under the file's hash in the user's cache.

A directory appears whole or not at all, and is made by one process while others wait for it. Its record, `gguf.json`, has the hash
of each of its files: one that was changed, cut off or made by another form of the conversion is made again. Torch is imported only
in the child process that converts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from atropos_core import console
from atropos_core.console.terminal import put, rich_console
from atropos_core.console.waits import waiting
from atropos_core.errors import ConfigError, DeadlineExceeded, OutOfMemory, RunDirectoryError
from atropos_core.storage.atomic import appearing, write_whole
from atropos_torch_models.user_cache import user_cache

FORM = 1  # of what is written; counts up if a directory would be another one
RECORD = "gguf.json"
LOCK_S = 3600.0  # for another process that converts the same file
TICK_S = 0.2
LEAST_S, LEAST_BYTES_A_SECOND = 1800.0, 5e6  # for a conversion: half an hour, and more for a large file


def find_file(reference: str) -> Path | None:
    """Return the GGUF file that a model's reference names, itself or by its directory; None if it names none. Raises ConfigError."""
    path = Path(reference).expanduser()
    if os.path.isdir(path):
        if any(os.path.isfile(path / name) for name in ("config.json", "adapter_config.json")):
            return None
        found = sorted(one for one in path.iterdir() if one.suffix.lower() == ".gguf" and one.is_file())
        if len(found) > 1:
            names = ", ".join(one.name for one in found[:4]) + (", ..." if len(found) > 4 else "")
            raise ConfigError(
                f"model {reference!r:.300}: the directory has {len(found)} GGUF files ({names}).",
                remedy=f"Name one of them: --model {console.quoted(found[0])}",
            )
        return found[0].resolve() if found else None
    if os.path.isfile(path):
        return path.resolve() if path.suffix.lower() == ".gguf" or _begin(path) == b"GGUF" else None
    if path.suffix.lower() == ".gguf":
        raise ConfigError(
            f"model {reference!r:.300}: the file {path.absolute()!s:.300} does not exist.",
            remedy="Name a GGUF file of this machine; one on a hub has to be downloaded first. In a run file, ./ is relative to that "
            "file's folder; in a flag, a relative path starts in the current directory.",
        )
    return None


def model_directory(file: Path) -> tuple[Path, str]:
    """Return the model directory of a GGUF file, and the line that says what it is. Converts the file if the cache lacks it.
    Raises ConfigError, and RunDirectoryError if the cache cannot be written."""
    try:
        return _prepared(file, _stamp(file))
    except OSError as error:
        raise RunDirectoryError(
            f"the model {file} cannot be kept in {user_cache('gguf')}: {error}.",
            remedy="See that its disk has room and that this user may write there, or name another folder in XDG_CACHE_HOME.",
        ) from error


@lru_cache(maxsize=64)
def _prepared(file: Path, stamp: tuple[int, ...]) -> tuple[Path, str]:
    """Do it once in a process, and say so once. `stamp` tells a changed file from the old one."""
    root = user_cache("gguf")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = _digest(file, stamp, root)
    with _locked(root / f".{digest}.lock", file) as lock:
        directory = next(root.glob(f"*-{digest}"), None)
        damage = "is not there" if directory is None else _damage(directory)
        if directory is None or damage:
            if directory is not None:
                console.warn(f"the model made from {file} {damage}: making it again")
            directory = directory or root / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', file.stem)}-{digest}"
            with waiting(f"{file.name} to be converted to a model directory"), appearing(directory) as partial:
                _write_record(partial, _convert(file, partial, lock))
        said = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    line = f"{file.name}, dequantized from {said['from']} to {said['to']}"
    put(rich_console(stderr=True), f"model: {line} in {directory}", markup=False)
    if said["warning"]:
        console.warn(said["warning"])
    return directory, line


def _begin(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError:
        return b""


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with every write to a file. The time of its last change, unlike that of its content, cannot be set."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(file: Path, stamp: tuple[int, ...], root: Path) -> str:
    """Return the start of the file's hash, remembered for this stamp: a file of 8 GB takes ten seconds to hash."""
    known = root / f".{hashlib.sha256(os.fsencode(file)).hexdigest()[:16]}.stamp"
    try:
        before, digest = json.loads(known.read_text(encoding="utf-8"))
        if before == list(stamp) and re.fullmatch("[0-9a-f]{16}", digest):
            return str(digest)
    except (OSError, ValueError, TypeError):
        pass
    with waiting(f"the hash of {file.name}"):
        digest = _sha256(file)[:16]
    write_whole(known, json.dumps([stamp, digest]))
    return digest


@contextmanager
def _locked(path: Path, file: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of one file's directory. The child process that converts holds it too, until it ends."""
    with path.open("ab") as lock:
        with waiting(f"another process that converts {file.name}"):
            began = time.monotonic()
            while not _is_taken(lock):
                if time.monotonic() - began > LOCK_S:
                    raise DeadlineExceeded(
                        f"another process has converted {file} for {LOCK_S / 60:.0f} minutes, and still holds {path}.",
                        remedy="End that process, and try again.",
                    )
                time.sleep(TICK_S)
        yield lock


def _is_taken(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_record(directory: Path, said: dict[str, Any]) -> None:
    files = {
        path.name: [path.stat().st_size, path.stat().st_mtime_ns, _sha256(path)] for path in sorted(directory.iterdir())
    }
    (directory / RECORD).write_text(json.dumps({"form": FORM, **said, "files": files}, indent=1), encoding="utf-8")


def _damage(directory: Path) -> str:
    """Return what is wrong with a directory, "" if nothing is. A file is hashed again only if its size or time has changed."""
    try:
        said = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if said["form"] != FORM:
            return "was made by another version of Atropos"
        for name, (size_bytes, modified_ns, digest) in said["files"].items():
            path = directory / name
            found = path.stat()
            if found.st_size != size_bytes or (found.st_mtime_ns != modified_ns and _sha256(path) != digest):
                return f"is damaged ({path} has changed)"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"is damaged ({error})"
    return ""


def _convert(file: Path, directory: Path, lock: IO[bytes]) -> dict[str, Any]:
    """Let a child process fill the directory, so that torch and the weights leave with it. Return what it says of them."""
    command = [sys.executable, "-m", "atropos_torch_models.gguf_conversion", str(file), str(directory)]
    limit_s = LEAST_S + file.stat().st_size / LEAST_BYTES_A_SECOND
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, pass_fds=[lock.fileno()], errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{file} was not converted within {limit_s:.0f} s.",
            remedy="Convert it on a machine that is faster or less busy.",
        ) from None
    try:
        said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        if ended.returncode == -signal.SIGKILL:
            raise OutOfMemory(
                f"the process that converted {file} was killed, as the system does when memory runs out."
            ) from None
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(
            f"{file} could not be converted: the process ended with {ended.returncode}: {last:.500}",
            remedy="Convert it with the tools of its authors, and give the directory that save_pretrained writes.",
        ) from None
    if "error" in said:
        raise ConfigError(said["error"], remedy=said["remedy"])
    return said
