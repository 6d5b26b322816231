"""`atropos_core.view` and `save_view`. The page's server is a child process, which ends with this one."""

from __future__ import annotations

import atexit
import html
import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import IO

from atropos_core.errors import AtroposError, DeadlineExceeded
from atropos_core.storage.run_records import RunRecords
from atropos_viewer import command

START_S, END_S = 60.0, 10.0
ADDRESS = re.compile(r"^http://\S+$")


class ServedPage:
    """See `View` of atropos_core.scripting.results."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url = url  # with the token that opens it
        self._process = process
        atexit.register(self.close)

    @property
    def is_open(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the server; may be called twice."""
        atexit.unregister(self.close)
        _end(self._process)

    def __enter__(self) -> ServedPage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"View({self.url!r})" if self.is_open else "View(closed)"

    def _repr_html_(self) -> str:
        """A link for a notebook, because the page cannot be shown in a frame."""
        if not self.is_open:
            return "closed"
        return f'<a href="{html.escape(self.url)}" target="_blank" rel="noopener">Look at the runs</a>'


def view(runs: Sequence[Path], port: int) -> ServedPage:
    """Start the server. Raises AtroposError with the command's message if it fails, DeadlineExceeded after 60 s of silence."""
    for run in runs:
        RunRecords(run)  # raises what is wrong under its own name
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, "view", *map(str, runs), "--port", str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    said: list[str] = []
    end = monotonic() + START_S
    try:
        while (line := lines.get(timeout=max(0.0, end - monotonic()))) is not None:
            if ADDRESS.match(line):
                return ServedPage(line, process)
            said.append(line)
    except queue.Empty:
        _end(process)
        raise DeadlineExceeded(f"`atropos view` gave no address in {START_S:g} s: {' '.join(said)}") from None
    except BaseException:
        _end(process)
        raise
    _end(process)
    raise AtroposError(" ".join(said) or f"`atropos view` ended with {process.returncode}, and said nothing.")


def save_view(runs: list[Path], out: Path, megabytes: float | None, force: bool) -> None:
    command.view(runs, html=out, html_mb=command.HTML_MB if megabytes is None else megabytes, force=force)


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Read the stream to its end, so that the server never waits for a reader."""
    for line in stream:
        lines.put(line.strip())
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _end_with_the_caller() -> None:
    """End with the caller: this process's standard input closes when the caller ends, however it does."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from atropos_core.cli import main

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a script, or of a cell, is for the call that it interrupts
    Thread(target=_end_with_the_caller, daemon=True).start()
    main()
