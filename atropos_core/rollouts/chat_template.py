"""A model's chat template, rendered in a process that can be ended.

A template is a program that came with a model: it may loop, recurse or grow without end, on any conversation. Each process of a run
that renders starts one child, which renders for all of its templates (`template_process.py`). The child is replaced when a limit has
ended it. It starts with the first template, in 0.06 s and 20 MB, and ends with its parent. A call costs 0.05 ms more than rendering
in place (a virtual machine with 2 cores). The result is text; `tokenizer.py` makes the ids.
"""

from __future__ import annotations

import atexit
import marshal
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from atropos_core.errors import ConfigError, DataError, WorkerLost
from atropos_core.rollouts.template_calls import (
    CPU_S,
    REFUSED,
    RENDERED,
    TOO_MUCH,
    UNREADABLE,
    receive,
    send,
)

PROGRAM = "atropos_core.rollouts.template_process"
ANSWER_S = (
    30.0  # until a call is answered. The process may use only CPU_S of CPU time for it; a busy machine takes longer
)
END_S = 1.0  # until the process has ended, once its connection is closed
OTHER_TEMPLATE = "Put the chat template that the model's authors publish into the model's directory."


class ChatTemplate:
    """`today`: the date for templates that ask for it, as 2026-01-31; "": today. Raises ConfigError for a template that is missing or
    cannot be read."""

    def __init__(self, source: str | None, directory: Path, today: str = "", renderer: Renderer | None = None) -> None:
        if source is None:
            raise ConfigError(
                f"the model {directory.name} has no chat template, so a conversation cannot be rendered for it.",
                remedy="Add a chat_template.jinja to its directory, or use an instruction-tuned model.",
            )
        self._named = f"the chat template of {directory.name}"
        self._source, self._today = source, today or date.today().isoformat()
        self._renderer = renderer or _of_this_process
        self._call(None)

    def render(self, **values: Any) -> str:
        """Render `values`, which are JSON. Raises DataError if the template refuses them, fails, or exceeds a limit of time or memory."""
        try:
            return self._call(_plain(values))
        except RecursionError:
            raise DataError("these messages are nested too deep to be rendered.", remedy="Send flatter ones.") from None

    def _call(self, values: Any) -> str:
        """`values`: as `_plain` returns them; None: only compile the template."""
        try:
            # Version 2 has no references: the size of a request is that of its texts.
            request = marshal.dumps((self._source, self._today, values), 2)
            kind, text = self._renderer.call(request)
        except _Ended as error:
            kind, text = TOO_MUCH, str(error)
        except ValueError as error:  # of marshal: its own bound on depth
            raise RecursionError from error  # said once, by render()
        if kind == RENDERED:
            return text
        if kind == UNREADABLE or values is None:
            raise ConfigError(f"{self._named} cannot be read: {text}.", remedy=OTHER_TEMPLATE)
        if kind == REFUSED:
            raise DataError(f"{self._named} refuses these messages: {text}")
        raise DataError(f"{self._named} was ended: {text}.", remedy=f"Shorten the conversation. {OTHER_TEMPLATE}")


def _plain(value: Any) -> Any:
    """Return the value in JSON types, as transformers passes it to a template: no objects with other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value] if isinstance(value, list) else tuple(map(_plain, value))
    if isinstance(value, str):  # a text of an enum, say: its letters
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise DataError(
        f"a message has a value of type {type(value).__name__}, which a chat template cannot show.",
        remedy="Messages and tools are JSON: texts, numbers, lists and dicts.",
    )


class _Ended(Exception):
    """Raised if the process ended, or was ended, before it answered."""


class Renderer:
    """A process that renders. It starts with the first call, and again after it has ended. `cpu_s`: CPU time per call."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def call(self, request: bytes) -> tuple[int, str]:
        """Send one request and return the answer. Raises _Ended, WorkerLost."""
        with self._lock:
            connection = self._started()
            try:
                send(connection, request)
                answer = receive(connection)
            except TimeoutError:
                self._end(now=True)
                raise _Ended(f"it was not rendered within {ANSWER_S:g} s") from None
            except OSError:
                answer = None
            except BaseException:  # of a signal's handler: the answer would be taken for the next one's
                self._end(now=True)
                raise
            if answer is None:
                code = self._end()
                if code == -signal.SIGPROF:
                    raise _Ended(f"it took more than {self._cpu_s:g} s of CPU time")
                raise WorkerLost(
                    f"the process that renders chat templates ended (exit code {code}).",
                    remedy="Its output is in this process's stderr. The next conversation gets a new process.",
                )
            if answer[0] == TOO_MUCH:
                self._end()
            return answer[0], answer[1:].decode("utf-8", "surrogatepass")

    def _started(self) -> socket.socket:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(self._cpu_s)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C in the terminal concerns this process only
                )
            ours.settimeout(ANSWER_S)
            self._connection = ours
        return self._connection

    def _end(self, *, now: bool = False) -> int | None:
        """End the process, and return its exit code."""
        popen, connection = self._popen, self._connection
        self._popen = self._connection = None
        if connection is not None:
            connection.close()
        if popen is None:
            return None
        if now:
            popen.kill()
        try:
            return popen.wait(END_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            return popen.wait()

    def close(self) -> None:
        with self._lock:
            self._end()

    def left_to_parent(self) -> None:
        """Close the connection in a forked process. If the fork kept it open, the parent could not close it."""
        if self._connection is not None:
            self._connection.close()
        if self._popen is not None:
            self._popen.returncode = 0  # not a child of this process: nothing is to be waited for
        self._forget()


_of_this_process = Renderer()
os.register_at_fork(after_in_child=_of_this_process.left_to_parent)
end_renderer = _of_this_process.close  # the next conversation gets a new one
atexit.register(end_renderer)
