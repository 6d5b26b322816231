"""A guard process around a command, so that the command cannot end without a message.

C code may call `exit(0)`, and a kernel that is out of memory kills a process without a message. The guard then prints a line
and exits with a code other than 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress

STARTED = ("run", "resume", "train", "serve-agent")  # commands that write a summary before they end
GUARDED = (*STARTED, "eval", "process", "check", "audit", "rescore", "replay")  # and others that run components
_SAVED = "`atropos doctor RUN` on the run directory says what is saved, `atropos resume RUN` continues from there."
_UNSAVED = "look for a component that ends its process, or closes file descriptors that it did not open."
_PR_SET_PDEATHSIG = 1
_MOMENT_S = 0.3
_TO_ALL = {signal.SIGINT}  # from a terminal: it goes to both processes at once


def guarded(command: str, work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code. The child ends with this process. Both share a terminal and a
    process group; signals that reach only this process are passed on."""
    if not hasattr(signal, "sigwaitinfo"):
        return work()
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    passed_on -= {number for number in passed_on if signal.getsignal(number) is signal.SIG_IGN}
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _end_with(guard)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Code that imports a component would see a KeyboardInterrupt as the component's error. Running loops have own handlers.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = 1  # of what it raises, which is on the screen as long as the screen is there
        try:
            code = work()
        finally:
            with suppress(OSError):  # closed by a component, as its standard error may be
                os.write(writing, bytes([code & 0xFF]))
        return code
    os.close(writing)
    os.set_blocking(reading, False)  # what a component forked may have the other end as well
    requested: set[int] = set()  # to end
    while True:
        info = signal.sigwaitinfo(passed_on | {signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            requested.add(info.si_signo)  # also if the other process has ended by it already
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            try:
                handed_in = os.read(reading, 1)
            except BlockingIOError:
                handed_in = b""
            code = os.waitstatus_to_exitcode(status)
            if -code in passed_on - requested and signal.sigtimedwait({-code}, _MOMENT_S) is not None:
                requested.add(-code)  # sent to the whole group, it can be here after the other process has ended by it
            return _exit_code(command, code, handed_in, requested)
        if info.si_signo == signal.SIGCHLD:
            _say_if_stopped(pid)
            continue
        from_terminal = info.si_code > 0
        if not (from_terminal and info.si_signo in _TO_ALL):
            os.kill(pid, info.si_signo)


def _exit_code(command: str, code: int, handed_in: bytes, requested: Collection[int]) -> int:
    """Return the exit code of this process. After an ordinary end it is the command's own, whose error is already on the
    screen. `requested`: signals that this process received too."""
    if handed_in and code >= 0:
        return code or handed_in[0]
    if -code in requested:  # before the command installed its own handler
        sys.stderr.write(f"Interrupted ended by {signal.Signals(-code).name}, before it was done.\n")
        return 128 - code
    how = (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"was ended with exit code {code} by code in it"
    )
    memory = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    sys.stderr.write(
        f"ProcessDied the process of this command {how}{memory}, before it was done.\n"
        f"What to do: {_SAVED if command in STARTED else _UNSAVED}\n"
    )
    sys.stderr.flush()
    return 128 - code if code < 0 else 1


def _say_if_stopped(pid: int) -> None:
    """Say that the command's process is stopped, after a moment: Ctrl-Z stops this process too, and needs no message."""
    time.sleep(_MOMENT_S)
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return
    if state in "Tt":
        sys.stderr.write(f"warning the process of this command is stopped; to continue it: kill -CONT {pid}\n")
        sys.stderr.flush()


def _end_with(guard: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)
