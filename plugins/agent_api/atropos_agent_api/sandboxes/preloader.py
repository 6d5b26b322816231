"""The process that imports an agent's function once and forks monitors: `python -m ... DESCRIPTOR WHERE NAME`. Only `preloaded.py`
starts it. It ends when its supervisor hangs up or dies; its monitors have their own sockets.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from atropos_agent_api.sandboxes.descendants import descendants
from atropos_agent_api.sandboxes.function import load, run
from atropos_agent_api.sandboxes.monitor import Monitor, run_monitor

_PR_SET_CHILD_SUBREAPER = 36


class FunctionMonitor(Monitor):
    """A monitor whose program is the function, in a fork of this process."""

    function: Callable[[dict[str, Any]], Any]

    def execute(self, argv: list[str], environment: dict[str, str]) -> None:
        """Run the function; never returns."""
        os.closerange(3, 1 << 16)  # closing one of them tells the monitor that the program has begun
        os.environ.clear()
        os.environ.update(environment)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # both are files
        code = 0
        try:
            run(self.function)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001 - the plugin boundary: errors that end a program
            traceback.print_exc()
            code = 1
        try:
            sys.stdout.flush()
        finally:
            os._exit(code)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # so that processes of a killed monitor become children of this one, to be ended
    try:
        FunctionMonitor.function = staticmethod(load(*sys.argv[2:4]))  # not a method
    except BaseException as error:  # noqa: BLE001 - the plugin boundary: errors of the import
        traceback.print_exc()
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:4000]}).encode())
        return
    started = sorted(one.name for one in threading.enumerate() if one is not threading.main_thread())
    control.send(json.dumps({"threads": ", ".join(started)[:1000]} if started else {}).encode())
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    monitors: set[int] = set()
    while True:
        ready, _, _ = select.select([control.fileno(), reading], [], [])
        if reading in ready:
            os.read(reading, 4096)
            _take_in(monitors)
        if control.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                _become_monitor(control, descriptors[0])
            monitors.add(pid)
            os.close(descriptors[0])
            watched = os.pidfd_open(pid)
            socket.send_fds(control, [str(pid).encode()], [watched])
            os.close(watched)


def _become_monitor(control: socket.socket, descriptor: int) -> NoReturn:
    try:
        os.setsid()
        control.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_monitor(socket.socket(fileno=descriptor), FunctionMonitor)
    except BaseException:  # noqa: BLE001 - this process must not continue as a second preloader
        traceback.print_exc()
    finally:
        os._exit(0)


def _take_in(monitors: set[int]) -> None:
    """Wait for monitors that have ended, and kill what a killed monitor left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            break
        monitors.discard(pid)
    for one in descendants():
        if one.parent == os.getpid() and one.pid not in monitors:
            os.kill(one.pid, signal.SIGKILL)  # our own child, not waited for, so the number is its own


if __name__ == "__main__":
    main()
