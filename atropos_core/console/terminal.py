"""The terminal: its streams, the line that changes, and what happens when a stream is lost."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import IO, TYPE_CHECKING, Any

from atropos_core.errors import AtroposError

if TYPE_CHECKING:
    from rich.console import Console

_LOST: list[OSError] = []  # what became of standard output


def rich_console(*, stderr: bool = False) -> Console:
    """Return rich's console for a standard stream. Importing rich takes a sixth of the time of `atropos plugins`: see `is_plain`."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


def is_plain(*texts: str) -> bool:
    """True if rich would print these texts unchanged."""
    if sys.stdout.isatty() or os.environ.get("FORCE_COLOR") or os.environ.get("TTY_COMPATIBLE"):
        return False
    notebook = "IPython" in sys.modules  # where rich shows HTML
    return not notebook and all(line.isprintable() for text in texts for line in text.split("\n"))


def put(console: Console, *what: Any, **how: Any) -> None:
    """Print by rich."""
    LINE.close()
    try:
        try:
            console.print(*what, **how)
        except UnicodeEncodeError:
            _escape_unencodable(console.file)
            console.print(*what, **how)
    except (OSError, SystemExit) as error:  # rich raises the latter for a pipe without a reader
        _discard_further(console.file, error)


def put_line(text: str) -> None:
    """Print a line without rich."""
    LINE.close()
    write(f"{text}\n")


def write(text: str) -> None:
    """Write to standard output. A line that changes is not closed."""
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:
            _escape_unencodable(sys.stdout)
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard_further(sys.stdout, error)


def put_escapes(text: str) -> None:
    """Write the escape codes of a picture, only to a terminal."""
    if sys.stdout.isatty():
        LINE.close()
        write(text)


def refuse_lost_output() -> None:
    """Raises AtroposError if something printed could not be written, except when the reader has gone (as `head` does). Called at
    the end of commands whose only result is their output."""
    if _LOST:
        raise AtroposError(
            f"what this command printed could not be written to standard output: {_LOST[0].strerror}.",
            remedy="Make room there, or write it elsewhere, and type it again.",
        )


def _escape_unencodable(file: IO[str]) -> None:
    """From now on, escape characters that the terminal's encoding lacks, and half surrogate pairs, as Python does on standard
    error. The failed write wrote nothing."""
    if reconfigure := getattr(file, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def reader_gone(error: OSError, descriptor: int) -> bool:
    """True if this write error means that the reader has gone: a closed pipe or a closed terminal. EIO from a disk is a disk
    error."""
    on_a_disk = stat.S_ISREG(os.fstat(descriptor).st_mode)
    return error.errno == errno.EPIPE or (error.errno == errno.EIO and not on_a_disk)


def _discard_further(file: IO[str], error: BaseException) -> None:
    """After the terminal or pipe has gone, or the disk is full, discard further output so that the run continues."""
    with suppress(OSError, ValueError):
        if isinstance(error, OSError) and file.fileno() == 1 and not reader_gone(error, 1):
            _LOST.append(error)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


class LiveLine:
    """The line of a terminal that changes. Anything else that Python prints starts on a new line."""

    def __init__(self) -> None:
        self.lock = RLock()  # for everything that is printed: the line of waits is printed by a thread
        self._on: IO[str] | None = None  # the stream with an open line
        self._stays = False
        self._unended = False  # True if other code last printed text without an end of line
        self._writes: dict[int, Callable[[str], int]] = {}  # of the streams themselves, by id

    def show(self, line: str, file: IO[str], *, stays: bool) -> None:
        """Show the line. `stays`: keep it when something else is printed, instead of removing it."""
        with self.lock:
            self._watch_streams()
            if self._on is not None and (self._on is not file or self._stays != stays):
                self.close()
            begin = "\n" if self._unended else "\r\x1b[2K"
            if self._unended:
                for other in (sys.stdout, sys.stderr):  # Python keeps a line until it ends
                    with suppress(OSError):
                        other.flush()
            self._unended = False
            self._write(file, f"{begin}{line}")
            self._on, self._stays = file, stays

    def close(self) -> None:
        with self.lock:
            if self._on is not None:
                file, self._on = self._on, None
                self._write(file, "\n" if self._stays else "\r\x1b[2K")

    def forget(self) -> None:
        """Start anew in a fork: the thread that may hold the lock does not exist there."""
        self.lock, self._on = RLock(), None

    def remove(self) -> None:
        """Close the line unless it stays."""
        with self.lock:
            if not self._stays:
                self.close()

    def _write(self, file: IO[str], text: str) -> None:
        try:
            self._writes.get(id(file), file.write)(text)
            file.flush()
        except OSError as error:
            _discard_further(file, error)

    def _watch_streams(self) -> None:
        """Let warnings, logging, print() and tracebacks of any code close the line, from the first one on. The streams' own `write`
        is replaced, because a logging handler keeps the stream that it was made with."""
        for file in (sys.stdout, sys.stderr):
            if id(file) in self._writes or not file.isatty():
                continue
            self._writes[id(file)] = write = file.write

            def written(text: str, write: Callable[[str], int] = write) -> int:
                with self.lock:
                    if text:
                        self.close()
                        self._unended = not text.endswith("\n")
                    return write(text)

            file.write = written  # type: ignore[method-assign]


LINE = LiveLine()  # a terminal has one
