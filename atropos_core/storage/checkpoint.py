"""Durable checkpoints: a directory that is renamed into place once it is complete.

`checkpoints/step-000050/` holds `policy/` (written by the trainer; a Hugging Face directory for a Hugging Face model) and
`manifest.json`: the run's state, and the size and SHA-256 of every file. If the files of a checkpoint do not match its manifest,
a warning says so and the one before is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core.errors import CheckpointError, RemoteError
from atropos_core.storage.atomic import WRITABLE, sync
from atropos_core.storage.reading import numbered, open_file, parse_json, read_file

FORMAT = 1
POLICY = "policy"
FULL_BYTES = 1 << 20  # a disk with less free space counts as full
AS_WRITTEN = "Resume with the components, options and version of atropos-core that wrote it, or start a new run."
LEAST_S = 10.0  # between checkpoints if the user set no interval
MOST_SHARE = 0.05  # of a run's time for saving, in that case
# Of the older checkpoints that a rollback may need, each is kept if the next older one is more than 4 times the age of the next newer one.
AGE_RATIO = 4
OLDEST_AGE = 128  # steps; only one checkpoint as old as this is kept


def seconds_between(saving_s: float) -> float:
    """Return the time from the end of one checkpoint to the start of the next, if no interval is set and the last took `saving_s`."""
    return max(LEAST_S, saving_s * (1 / MOST_SHARE - 1))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    directory: Path
    step: int
    state: Mapping[str, Any]

    @property
    def policy(self) -> Path:
        return self.directory / POLICY


def kept_steps(steps: Sequence[int], keep: int) -> list[int]:
    """Return which checkpoints stay for a run that may roll back, of those at `steps`, in ascending order: the last `keep`, and older
    ones that lie ever further apart. For an exploit that began n steps ago, one is kept that is at most AGE_RATIO times as old as the
    newest one from before it, up to OLDEST_AGE."""
    latest, older = list(steps[-keep:]), list(steps[:-keep])
    ages = [latest[-1] - step for step in older]
    oldest = max(sum(age >= OLDEST_AGE for age in ages) - 1, 0)
    newer_age = latest[-1] - latest[0]
    kept = []
    for at in range(len(older) - 1, oldest - 1, -1):
        if at > oldest and ages[at - 1] <= AGE_RATIO * newer_age:
            continue  # the next older one is near enough
        kept.append(older[at])
        newer_age = ages[at]
    return [*reversed(kept), *latest]


def most_kept(keep: int, every: int | None, steps: int) -> int:
    """Return how many checkpoints `kept_steps` leaves at most, of a run of so many steps that saves one every `every` steps."""
    there: list[int] = []
    most = 0
    for step in range(every or 1, min(steps, 4 * OLDEST_AGE + (keep + 4) * (every or 1)) + 1, every or 1):
        there = kept_steps([*there, step], keep)
        most = max(most, len(there))
    return most


class Checkpoints:
    """The checkpoints of one run. Only the last `keep` are kept, and with `for_rollback` those of `kept_steps`."""

    def __init__(self, directory: Path, keep: int = 2, *, for_rollback: bool = False) -> None:
        self.directory = directory
        self._keep = keep
        self._for_rollback = for_rollback

    async def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], Awaitable[None]]) -> Checkpoint:
        """Let `write` fill the policy's directory, then make the whole checkpoint durable. Raises CheckpointError; earlier
        checkpoints stay as they were."""
        final = self.directory / f"step-{step:06d}"
        partial = self.directory / f".{final.name}.partial"
        try:
            _remove(partial)
            (partial / POLICY).mkdir(parents=True)
            await write(partial / POLICY)
            await asyncio.to_thread(self._seal, partial, final, step, state)  # gigabytes to read and to sync
        except (OSError, RemoteError) as error:
            is_full = (
                shutil.disk_usage(self.directory).free < FULL_BYTES
            )  # then the error is often a library's, with a long trace
            _remove(partial)
            raise CheckpointError(
                f"checkpoint {final} cannot be written: {'the disk is full.' if is_full else error}",
                remedy=f"{WRITABLE} Then `atropos resume` this run: what was saved before is intact.",
            ) from error
        except BaseException:
            _remove(partial)
            raise
        found = self._found()
        before = found[: found.index(final) + 1]  # later ones were passed over as broken
        stay = set(before[-self._keep :])
        if self._for_rollback:
            by_step = {at: path for at, path in numbered(self.directory, "step-") if at <= step}
            stay = {by_step[at] for at in kept_steps([*by_step], self._keep)}
        for old in before:
            if old not in stay:
                _remove(old)
        return Checkpoint(final, step, state)

    def _seal(self, partial: Path, final: Path, step: int, state: Mapping[str, Any]) -> None:
        files = {}
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            files[str(path.relative_to(partial))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            sync(path)
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "state": state, "files": files}
        manifest["sha256"] = _digest(manifest)
        (partial / "manifest.json").write_text(json.dumps(manifest))
        for path in (partial / "manifest.json", partial / POLICY, partial):
            sync(path)
        _remove(final)  # the same step again, after a resume: identical in a deterministic run
        partial.rename(final)
        sync(self.directory)

    def sweep(self) -> None:
        """Remove unfinished checkpoints of a killed run. Only call this while holding the run directory's lock."""
        for partial in self.directory.glob(".step-*.partial"):
            _remove(partial)

    def set_aside_after(self, step: int, number: int) -> None:
        """Remove the checkpoints after `step` from those that a run resumes from. The newest becomes `rolled-back-NUMBER-step-STEP`.
        May be called again after it was interrupted."""
        later = [path for at, path in numbered(self.directory, "step-") if at > step]
        if later and not any(self.directory.glob(f"rolled-back-{number}-step-*")):
            newest = later.pop()
            newest.rename(self.directory / f"rolled-back-{number}-{newest.name}")
        for path in later:
            _remove(path)
        sync(self.directory)

    def latest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None. Broken ones are named through `warn`. Raises CheckpointError if all of
        them are broken."""
        found = self._found()
        for directory in reversed(found):
            try:
                return _verified(directory)
            except CheckpointError as error:
                warn(f"{error} It is passed over.")
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self.directory} is whole.",
                remedy=f"Start a new run; a policy whose files are whole can begin it: --model {found[-1] / POLICY}",
            )
        return None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of this step. Raises CheckpointError if it is missing or broken."""
        if step not in (steps := self.steps()):
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}. Choose one of: {there}.")
        return _verified(self.directory / f"step-{step:06d}")

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or not, in ascending order."""
        return [step for step, _ in numbered(self.directory, "step-")]

    def _found(self) -> list[Path]:
        return [path for _, path in numbered(self.directory, "step-")]


def _verified(directory: Path) -> Checkpoint:
    try:
        manifest = parse_json(read_file(directory / "manifest.json"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {directory} has format {manifest['format']}; this program reads {FORMAT}. Resume with the version of "
                "atropos-core that wrote it."
            )
        if manifest.pop("sha256") != _digest(manifest):
            raise CheckpointError(f"checkpoint {directory} is corrupt: its manifest is not what was written.")
        for name, wanted in manifest["files"].items():
            path = directory / name
            if path.stat().st_size != wanted["bytes"] or _sha256(path) != wanted["sha256"]:
                raise CheckpointError(f"checkpoint {directory} is corrupt: {name} is not what the manifest says.")
        if not isinstance(manifest["state"], dict):
            raise CheckpointError(f"checkpoint {directory} is corrupt: its state is not an object of JSON.")
        return Checkpoint(directory, int(manifest["step"]), manifest["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {directory} cannot be read: {type(error).__name__}: {error}.") from error


@contextmanager
def taking_up(what: str) -> Iterator[None]:
    """Raise CheckpointError for any exception of code that reads a complete state: another version may have written it in another
    form. `what`: which part of which checkpoint, such as "the state of the curriculum in ..."."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        found = f"has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error!s:.300}"
        raise CheckpointError(
            f"{what} is not of the form that this program reads: {found}.",
            remedy=AS_WRITTEN,
        ) from error


def _remove(path: Path) -> None:
    """Remove a checkpoint, or a file in its place, as far as possible. (`rmtree` on a pipe would wait.)"""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type] # IO has no readinto, the file has
