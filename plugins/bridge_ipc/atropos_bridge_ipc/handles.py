"""Handle files: how a process of the run finds a segment that another process, with no socket to it, has made.

A file names its owner (pid and start time), the run's nonce and the model, and only this user may read it. All four are
checked before the file is used. It holds no weights: the memory ends with the processes that map it. A killed owner
leaves a few kilobytes, which the next run in the same directory removes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_core.errors import WeightsMismatch

FORMAT = 1
_SHOWN = 8  # characters of a nonce or hash in a message


def write(path: Path, nonce: str, model: str, content: Mapping[str, Any]) -> None:
    """Replace `path`, in one step, by a file of this process. `content`: JSON, and bytes."""
    owner = {"pid": os.getpid(), "started": started(os.getpid())}
    entry = {"format": FORMAT, "owner": owner, "nonce": nonce, "model": model, "content": _texts(content)}
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(entry, file)
        written.rename(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def read(path: Path, nonce: str, model: str) -> dict[str, Any]:
    """Return what the owner wrote, with its pid under "pid". Raises WeightsMismatch, with the reason, if the file is
    missing, not private, of another run or of another model, or if its owner is gone."""
    entry = _load(path)
    pid, since = entry["owner"]["pid"], entry["owner"]["started"]
    now = started(pid)
    if entry["nonce"] != nonce:
        if now != since:
            raise WeightsMismatch(
                f"stale handle file {path}: it was written by an earlier run, and its owner (pid {pid}) is gone.",
                remedy="Nothing in this run replaced it: look for the engine's own error in its log.",
            )
        raise WeightsMismatch(
            f"foreign nonce in handle file {path}: it belongs to another run that is alive (pid {pid});"
            f" it says {entry['nonce'][:_SHOWN]}, this run's is {nonce[:_SHOWN]}.",
            remedy="Two runs must not share a run directory.",
        )
    if now is None:
        raise WeightsMismatch(f"dead owner of handle file {path}: there is no process {pid} any more.")
    if now != since:
        raise WeightsMismatch(
            f"dead owner of handle file {path}: process {pid} is another one now, started at {now} instead of {since}."
        )
    if entry["model"] != model:
        raise WeightsMismatch(
            f"handle file {path} is of another model: it says {entry['model'][:_SHOWN]}, this run's is {model[:_SHOWN]}.",
            remedy="Trainer and engine must open the same model directory.",
        )
    return {**_bytes(entry["content"]), "pid": pid}


def open_descriptor(path: Path, nonce: str, model: str, handle: Mapping[str, Any]) -> int:
    """The owner's descriptor of its segment, opened here: the caller closes it. `handle` is what `read` gave."""
    there = f"/proc/{handle['pid']}/fd/{handle['descriptor']}"
    try:
        descriptor = os.open(there, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsMismatch(
            f"cannot open {there}, which handle file {path} names: {error.strerror}.",
            remedy="Both processes must run as one user, on one machine, and see each other in /proc.",
        ) from error
    try:
        state = os.fstat(descriptor)
        if [state.st_dev, state.st_ino] != handle["segment"]:
            raise WeightsMismatch(f"{there} is not the segment {handle['segment']} that handle file {path} names.")
        read(path, nonce, model)  # the owner may have ended in between, and its number may be another's
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sweep(directory: Path) -> list[Path]:
    """Remove only the files of owners that have ended."""
    gone = []
    for path in sorted(directory.glob("*.json")):
        try:
            entry = _load(path)
        except WeightsMismatch:
            continue  # left for its next reader, which reports what is wrong with it
        if started(entry["owner"]["pid"]) != entry["owner"]["started"]:
            path.unlink(missing_ok=True)
            gone.append(path)
    for path in sorted(directory.glob("*.json.*.tmp")):
        if started(int(path.suffixes[-2].lstrip("."))) is None:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone


def started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot, or None if it does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def model_hash(directory: Path) -> str:
    """Identify a model directory without reading its weights: hash its config, and the names, sizes, dtypes and shapes
    of all stored tensors."""
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read() if path.suffix == ".json" else file.read(int.from_bytes(file.read(8), "little"))
        except OSError as error:
            raise WeightsMismatch(f"{path} cannot be read: {error.strerror}.") from error
        digest.update(f"{path.name} {size} {len(head)}\n".encode())
        digest.update(head)
    return digest.hexdigest()


def _load(path: Path) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightsMismatch(
            f"there is no handle file {path}: the process that should have written it did not."
        ) from None
    except OSError as error:
        raise WeightsMismatch(f"handle file {path} cannot be opened: {error.strerror}.") from error
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_mode & 0o077:
            raise WeightsMismatch(
                f"handle file {path} has mode {stat.S_IMODE(state.st_mode):04o}: others could have read or written it.",
                remedy="It must be a regular file of mode 0600.",
            )
        if state.st_uid != os.geteuid():
            raise WeightsMismatch(
                f"handle file {path} belongs to user {state.st_uid}, and this is user {os.geteuid()}."
            )
        text = file.read()
    try:
        entry = json.loads(text)
        whole = {"format", "owner", "nonce", "model", "content"} <= entry.keys()
    except (ValueError, AttributeError):
        whole = False
    if not whole or entry["format"] != FORMAT:
        raise WeightsMismatch(f"handle file {path} is not one of this version's ({len(text)} bytes).")
    loaded: dict[str, Any] = entry
    return loaded


def _texts(value: Any) -> Any:
    """JSON has no bytes."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {key: _texts(inner) for key, inner in value.items()}
    return [_texts(inner) for inner in value] if isinstance(value, list | tuple) else value


def _bytes(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"base64"}:
            return base64.b64decode(value["base64"])
        return {key: _bytes(inner) for key, inner in value.items()}
    return [_bytes(inner) for inner in value] if isinstance(value, list) else value
