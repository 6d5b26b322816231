"""The monitor of one program: a process that starts it, limits it, and ends all of it, even if the supervisor is killed.

`monitored.py` starts the monitor with one Unix socket. The monitor reads a job from the socket, reports there, and leaves the
program's directory until the socket closes. Then it kills what still runs, removes the directory and ends. So a supervisor that
is killed at any moment leaves no process and no file. Only the standard library, without site-packages: it starts in a few
hundredths of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from atropos_agent_api.sandboxes.cgroups import Groups
from atropos_agent_api.sandboxes.descendants import (
    HAS_PROC,
    MOST_ENDED,
    deleted_files,
    descendants,
    each_descendant,
    end_descendants,
    kill_descendants,
    memory_bytes,
)
from atropos_agent_api.sandboxes.forwarder import PIECE, Forwarder
from atropos_agent_api.sandboxes.trees import TooMuch, copy_tree, remove_tree, size_bytes, write_file

CONTROL = "{control}"  # an argument that stands for the descriptor on which the first process inside reports
CLOSE = b"close\n"  # the supervisor's last message
START_S = 50.0  # for the first process inside to start the program
COMMAND_S = 60.0  # for commands before and after a program
COUNT_S = 0.05  # between two counts of its processes
COUNT_SHARE = 5  # but at least this many times as long as a count takes
LOOK_S = 0.1  # between two looks at what the program uses
LOOK_SHARE = 20  # but at least this many times as long as a look takes
LONGEST_LOOK_S = 1.0  # and no longer than this
OPEN_FILES = 4096  # of one process
MOST_DESCRIPTORS = 16_384  # of all processes; a look counts them
PROCESS_SHARE, LEAST_TASKS = 8, 256  # threads allowed per process, and at least this many in all
SPARE_TASKS = 16  # allowed by the kernel beyond the number at which a look ends the program
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Monitor:
    """One program, from its directory to its end."""

    def __init__(self, supervisor: socket.socket, job: dict[str, Any], contents: list[bytes]) -> None:
        self._supervisor = supervisor
        self._job = job
        self._kind: str = job["kind"]  # "process"; "namespaces"; "container": its processes are not below this one
        self._contents = contents
        self._limits: dict[str, Any] = job["limits"]
        self._selector = selectors.DefaultSelector()
        self._files: dict[int, int] = {}  # the program's pipe -> the file for its output
        self._stdin = b""
        self._written = 0
        self._child: int | None = None
        self._control: socket.socket | None = None  # to the first process inside
        self._heard = b""
        self._forwarder: Forwarder | None = None
        self._started = 0.0
        self._reported: dict[str, Any] | None = None  # by that first process: how the program ended
        self._has_started = False
        self._limit: str | None = None
        self._stop = False
        self._has_directory = False
        self._has_after = False  # commands must run afterwards
        self._statuses: dict[int, int] = {}  # of children that were waited for
        self._groups = Groups(job["groups"])
        self._tasks = most_tasks(self._limits["processes"])
        self._own = 2 if self._kind == "namespaces" else 0  # bwrap, and the first process inside
        self._has_finished = threading.Event()
        self._disk = 0
        self._disk_at = 0.0  # when to measure it next
        self._free_bytes = 0  # of the disk, at the last measurement
        self.not_started = ""  # the reason
        self._is_closed = False  # the supervisor said that it is done
        self._is_alone = False  # the supervisor went without a word
        self.is_done = False  # one of the two

    def run(self) -> None:
        """Run the program from start to end. Every error is reported to the supervisor."""
        signal.signal(signal.SIGTERM, lambda *_: self.obey(CLOSE))
        try:
            self.prepare()
            self.start()
        except (OSError, TooMuch) as error:
            self.say({"event": "not_started", "why": str(error)})
            return
        if self._has_started:
            self.say({"event": "started"})
        try:
            self.watch()
            ended = self.finish()
        except OSError as error:  # of this process's own files, for example because its disk is full
            self.say({"event": "lost", "why": str(error)})
            return
        if not self._has_started:
            ended = {"event": "not_started", "why": self.not_started or ended["said"] or "it ended before it began"}
        self.say(ended)

    # -- before

    def prepare(self) -> None:
        """Make the directory and its contents. Raises OSError and TooMuch."""
        directory = self._job["directory"]
        os.mkdir(directory, 0o700)
        self._has_directory = True
        for name in ("work", "home", "tmp", "control"):
            os.mkdir(os.path.join(directory, name), 0o700)
        if self._job["inputs"] is not None:
            inputs = os.path.join(directory, "inputs")
            os.mkdir(inputs, 0o700)
            copy_tree(self._job["inputs"], inputs, self._limits["disk_bytes"])
        *files, self._stdin = self._contents
        for name, content in zip(self._job["files"], files, strict=True):
            write_file(directory, name, content)
        self._groups.make(self._limits["memory_bytes"], self._tasks + SPARE_TASKS)
        for argv in self._job["before"]:
            self._has_after = True
            if why := self._run(argv):
                raise OSError(why)

    def start(self) -> None:
        """Start the program. A pipe that closes shows that the exec succeeded. Raises OSError."""
        pipes = {}
        for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            reading, writing = os.pipe()
            ours, theirs = (writing, reading) if name == "stdin" else (reading, writing)
            pipes[number] = theirs
            os.set_blocking(ours, False)
            if name == "stdin":
                if self._stdin:
                    self._selector.register(ours, selectors.EVENT_WRITE, lambda events, to=ours: self._feed(to))
                else:
                    os.close(ours)
            else:
                self._files[ours] = os.open(self._job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                self._selector.register(ours, selectors.EVENT_READ, lambda events, one=ours: self._take(one))
        argv = self._job["argv"]
        control = None
        if self._kind == "container":
            self._listen()
        elif self._kind == "namespaces":
            self._control, control = socket.socketpair()
            self._control.setblocking(False)
            self._selector.register(self._control, selectors.EVENT_READ, lambda events: self._hear())
            os.set_inheritable(control.fileno(), True)
            argv = [str(control.fileno()) if word == CONTROL else word for word in argv]
        failing, failed = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            self._become(argv, pipes, failed)
        if control is not None:
            control.close()
        for descriptor in (*pipes.values(), failed):
            os.close(descriptor)
        with open(failing, "rb") as failure:
            if why := failure.read().decode():
                raise OSError(why)
        self._started = time.monotonic()
        self._has_started = self._kind == "process"

    def _become(self, argv: list[str], pipes: dict[int, int], failed: int) -> None:
        """Run in the child, until it becomes the program."""
        try:
            os.setsid()
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number, descriptor in pipes.items():
                os.dup2(descriptor, number)
            for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._groups.join()
            bounds = (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_NOFILE, OPEN_FILES),
                (resource.RLIMIT_FSIZE, self._limits["disk_bytes"]),
                (resource.RLIMIT_DATA, 2 * self._limits["memory_bytes"]),  # of each process, since looks could miss it
            )
            for bound, value in bounds if self._kind != "container" else ():
                _, hard = resource.getrlimit(bound)
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(bound, (value, value))
            os.chdir(self._job["cwd"])
            self.execute(argv, self._job["environment"])
        except BaseException as error:  # noqa: BLE001 # in any case, this process must not continue as a second monitor
            why = error.strerror if isinstance(error, OSError) else None
            os.write(failed, (why or repr(error)).encode()[:4000])
        os._exit(127)

    def execute(self, argv: list[str], environment: dict[str, str]) -> None:
        """Become the program. Raises OSError."""
        os.execvpe(argv[0], argv, environment)

    # -- while it runs

    def watch(self) -> None:
        """Wait until the program has ended, has reached a limit, or must end."""
        reading, writing = os.pipe()
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(reading, selectors.EVENT_READ, lambda events: os.read(reading, 4096))
        self._selector.register(
            self._supervisor, selectors.EVENT_READ, lambda events: self.obey(self._supervisor.recv(64))
        )
        threading.Thread(target=self._count, args=[writing], daemon=True).start()
        look_at = self._started
        while not self._has_ended() and not self._stop:
            now = time.monotonic()
            until = self._started + (self._limits["wall_time_s"] if self._has_started else START_S)
            if now >= until:
                self._limit = self._limit or "wall_time"
            # Its output may arrive before the report that it has started.
            if self._limit and (self._has_started or now >= until):
                break
            if now >= look_at:
                self._look()
                look_at = now + max(LOOK_S, min(LOOK_SHARE * (time.monotonic() - now), LONGEST_LOOK_S))
            else:
                for key, events in self._selector.select(min(until, look_at) - now):
                    key.data(events)

    def obey(self, message: bytes) -> None:
        """End the program on any message. If the supervisor is gone without saying CLOSE, only this process can remove its folder."""
        self._stop = True
        self.is_done = self.is_done or not message or message.endswith(CLOSE)
        self._is_alone = self._is_alone or (not message and not self._is_closed)
        self._is_closed = self._is_closed or message.endswith(CLOSE)

    def finish(self) -> dict[str, Any]:
        """End the remaining processes, and report how the program ended."""
        seconds = time.monotonic() - self._started
        self._has_finished.set()
        self._limit = self._limit or self._groups.limit()
        left = self._left_running()
        assert self._child is not None
        self._groups.end()  # first, because a walk through thousands of processes takes long
        is_whole = end_descendants(self._child, self._statuses)
        while self._files and self._take_all():
            pass
        if self._kind != "process":
            self._hear()
            status = -signal.SIGKILL if self._reported is None else self._reported["status"]
        else:
            status = os.waitstatus_to_exitcode(self._statuses.get(self._child, signal.SIGKILL))
        said = self._after()
        if self._job["memory_killed"] in said:
            self._limit = "memory"
        if not self._limit and not self._stop and self._disk_bytes() > self._limits["disk_bytes"]:
            self._limit = "disk"
        if self._forwarder is not None:
            self._forwarder.close()
        return {
            "event": "ended", "status": status, "limit": self._limit, "stopped": self._stop and not self._limit,
            "left_running": left if self._reported is None else self._reported["left_running"],
            "seconds": seconds, "is_whole": is_whole, "said": self._said(),
        }  # fmt: skip

    def _has_ended(self) -> bool:
        """True if the program has ended. Also waits for children that this process adopted. The program is waited for last: until
        then, the number of its process group is its own."""
        assert self._child is not None
        if not hasattr(os, "waitid"):
            pid, status = os.waitpid(self._child, os.WNOHANG)
            if pid:
                self._statuses[pid] = status
            return bool(pid)
        ended = os.WEXITED | os.WNOHANG
        for _ in range(MOST_ENDED):
            if (found := os.waitid(os.P_ALL, 0, ended | os.WNOWAIT)) is None:
                return False
            if found.si_pid == self._child:
                return True
            os.waitid(os.P_PID, found.si_pid, ended)
        return False

    def _left_running(self) -> int | None:
        if self._kind != "process" or not HAS_PROC or self._limit == "processes":  # some have been killed by now
            return None
        return sum(one.state != "Z" and one.pid != self._child for one in descendants())

    def _count(self, wake: int) -> None:
        """Count the processes until the program ends, and kill them if there are too many. Runs in a separate thread because a look
        can wait for many seconds: to read /proc/PID/maps it needs a lock, and a process that forks holds that lock while it waits for
        the CPU among thousands of others."""
        wait_s = 0.0
        while not self._has_finished.wait(wait_s):
            began = time.monotonic()
            if self._has_too_many():
                self._limit = self._limit or "processes"
                os.write(wake, b"x")
                while not self._has_finished.wait(COUNT_S):
                    self._groups.end()
                    kill_descendants()
                return
            wait_s = max(COUNT_S, min(COUNT_SHARE * (time.monotonic() - began), LONGEST_LOOK_S))

    def _has_too_many(self) -> bool:
        """Count processes only with reads that need no lock of the program."""
        most: int = self._limits["processes"] + self._own
        if self._job["groups"]:
            return self._groups.processes() > most
        alive = tasks = 0
        for one in each_descendant(self._child) if self._kind != "container" else ():
            alive += one.state != "Z"
            tasks += max(one.threads, 1)  # 0: a zombie
            if alive > most or tasks > self._tasks + self._own:
                return True
        return False

    def _look(self) -> None:
        found = descendants(self._child) if self._kind != "container" else []
        alive = [one for one in found if one.state != "Z"]
        tasks = sum(max(one.threads, 1) for one in found)
        if len(alive) - self._own > self._limits["processes"] or tasks - self._own > self._tasks:
            self._limit = "processes"
        if self._limit:
            return
        most = self._limits["memory_bytes"]
        if memory_bytes(alive, 0, most) > most:
            self._limit = "memory"
            return
        deleted = deleted_files(alive, MOST_DESCRIPTORS)
        if self._limit:  # by a count
            return
        if deleted.descriptors > MOST_DESCRIPTORS:
            self._limit = "processes"
        elif deleted.memory_bytes and memory_bytes(alive, deleted.memory_bytes, most) > most:
            self._limit = "memory"
        elif self._disk_is_due() and self._disk_bytes() + deleted.disk_bytes > self._limits["disk_bytes"]:
            self._limit = "disk"
        self._limit = self._limit or self._groups.limit()

    def _disk_is_due(self) -> bool:
        """True if the disk should be measured. Walking many files takes long, so it is done at intervals, or if the disk fills up."""
        room = self._limits["disk_bytes"] - self._disk
        return time.monotonic() >= self._disk_at or self._free_bytes - _free_bytes(self._job["directory"]) > room

    def _disk_bytes(self) -> int:
        began = time.monotonic()
        self._free_bytes = _free_bytes(self._job["directory"])
        self._disk = size_bytes(self._job["directory"], self._limits["disk_bytes"])
        now = time.monotonic()
        self._disk_at = now + LOOK_SHARE * (now - began)
        return self._disk

    # -- its streams, and the first process inside

    def _take_all(self) -> bool:
        """Copy the waiting output. Returns True if there was any."""
        return any(self._take(ours) for ours in list(self._files))

    def _take(self, ours: int) -> bool:
        try:
            piece = os.read(ours, PIECE)
        except BlockingIOError:
            return False
        room = self._limits["output_bytes"] - self._written
        if len(piece) > room:
            self._limit = self._limit or "output"
        if piece := piece[:room]:
            os.write(self._files[ours], piece)
            self._written += len(piece)
            return True
        self._selector.unregister(ours)
        os.close(ours)
        os.close(self._files.pop(ours))
        return False

    def _feed(self, theirs: int) -> None:
        try:
            self._stdin = self._stdin[os.write(theirs, self._stdin) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._stdin = b""
        if not self._stdin:
            self._selector.unregister(theirs)
            os.close(theirs)

    def _listen(self) -> None:
        """Listen for the first process inside a container, in a folder that is mounted there. Only its first connection counts."""
        folder = os.path.join(self._job["directory"], "control")
        os.chdir(folder)  # the name of a Unix socket must be short
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("socket")
        listener.listen(1)
        os.chdir("/")

        def accept(events: int) -> None:
            self._control, _ = listener.accept()
            self._control.sendall(json.dumps(self._job["inner_environment"]).encode() + b"\n")
            self._control.setblocking(False)
            self._selector.register(self._control, selectors.EVENT_READ, lambda events: self._hear())
            self._selector.unregister(listener)
            listener.close()
            os.unlink(os.path.join(folder, "socket"))

        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _run(self, argv: list[str]) -> str:
        """The error output of a command that fails; empty if it succeeds."""
        ended = self._command(argv)
        return (ended.stderr.decode(errors="replace").strip() or f"{argv[0]} failed") if ended.returncode else ""

    def _after(self) -> list[str]:
        """The output of the commands that run after the program has ended, however it ended."""
        if not self._has_after:
            return []
        self._has_after = False
        return [self._command(argv).stdout.decode(errors="replace").strip() for argv in self._job["after"]]

    def _command(self, argv: list[str]) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                argv,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_S,
                check=False,
                env=self._job["environment"],
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(
                argv, 1, b"", f"{argv[0]} gave no answer within {COMMAND_S:.0f} s".encode()
            )

    def _hear(self) -> None:
        """Read a report of the first process inside. The program could forge it, so it is trusted only about the program."""
        if self._control is None:
            return
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
        except OSError:
            return
        if not data:
            if self._control in self._selector.get_map():
                self._selector.unregister(self._control)
            return
        if descriptors:
            self._take_listener(descriptors[0])
        *lines, self._heard = (self._heard + data)[-4096:].split(b"\n")
        for event in map(_event, lines):
            if event.get("event") == "started" and not self._has_started:
                self._has_started = True
                self._started = time.monotonic()
                self.say({"event": "started"})
            elif event.get("event") == "not_started" and not self._has_started:
                self.not_started = str(event.get("why"))[:1000].encode(errors="replace").decode()
            elif event.get("event") == "processes":
                self._limit = "processes"
            elif event.get("event") == "ended" and _is_count(event.get("status"), -64, 255):
                left = event.get("left_running")
                is_right = _is_count(left, 0, 1 << 22)
                self._reported = {"status": event["status"], "left_running": left if is_right else None}

    def _take_listener(self, descriptor: int) -> None:
        """Take the API's listener, made inside. Anything else that is sent is closed."""
        is_wanted = self._forwarder is None and not self._has_started and self._job["api"] is not None
        try:
            listener = socket.socket(fileno=descriptor)
            listens = listener.getsockopt(socket.SOL_SOCKET, getattr(socket, "SO_ACCEPTCONN", 30))
        except OSError:  # not a socket
            os.close(descriptor)
            return
        if is_wanted and listens and listener.family == socket.AF_INET:
            self._forwarder = Forwarder(self._selector, listener, tuple(self._job["api"]))
        else:
            listener.close()

    def _said(self) -> str:
        """The end of standard error, which says why bwrap itself did not start."""
        if self._has_started:
            return ""
        with open(self._job["stderr"], "rb") as file:
            return file.read(4000).decode(errors="replace").strip()

    def say(self, event: dict[str, Any]) -> None:
        try:
            self._supervisor.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            pass  # the supervisor has gone, which the next read shows

    def close(self) -> None:
        self._groups.remove()
        self._after()
        if self._has_directory:
            remove_tree(self._job["directory"])
        if self._is_alone:
            try:
                os.rmdir(os.path.dirname(self._job["directory"]))  # if this was the last of its supervisor's programs
            except OSError:
                pass


def most_tasks(processes: int) -> int:
    """The most threads of all processes of a program together, if this many processes are allowed."""
    return max(PROCESS_SHARE * processes, LEAST_TASKS)


def _event(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _free_bytes(directory: str) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def read_exactly(connected: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises EOFError if the socket closes before."""
    data = bytearray()
    while len(data) < count:
        piece = connected.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def main() -> None:
    run_monitor(socket.socket(fileno=int(sys.argv[1])), Monitor)


def run_monitor(
    supervisor: socket.socket, kind: Callable[[socket.socket, dict[str, Any], list[bytes]], Monitor]
) -> None:
    """Do the job that `supervisor` sends, until it closes the socket. The work is done in a fork of this process, which waits above
    it and ends what the fork leaves if it is killed: by then, a daemon of the program may have neither mark nor parent."""
    supervisor.set_inheritable(False)
    _adopt_orphans()
    guard, worker = os.getpid(), os.fork()
    if worker:
        supervisor.close()
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGTERM))
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until it is waited for, the number is still its own
        end_descendants(None, {})
        return
    _adopt_orphans()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != guard:
        os._exit(1)
    _work(supervisor, kind)


def _adopt_orphans() -> None:
    """Make this process the parent of orphans below it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _work(supervisor: socket.socket, kind: Callable[[socket.socket, dict[str, Any], list[bytes]], Monitor]) -> None:
    signal.signal(signal.SIGHUP, lambda *_: os._exit(1))
    try:
        job = json.loads(read_exactly(supervisor, int.from_bytes(read_exactly(supervisor, 8), "big")))
        contents = [read_exactly(supervisor, size) for size in job["sizes"]]
    except EOFError:
        return  # the supervisor was killed before it had sent its job
    monitor = kind(supervisor, job, contents)

    def end_all(*_: object) -> NoReturn:
        """Called if the guard is killed: end everything, as if this process had been killed."""
        end_descendants(None, {})
        monitor.close()
        os._exit(1)

    signal.signal(signal.SIGHUP, end_all)
    try:
        monitor.run()
        while not monitor.is_done:
            monitor.obey(supervisor.recv(64))
    finally:
        end_descendants(None, {})
        monitor.close()
