"""Control groups of Linux that bound a program with all that it starts: memory of every kind, processes, threads, and its share of
the CPU.

A monitor (`monitor.py`) makes one group in each hierarchy that this process may write to (version 2 if it is delegated; version 1 as root),
has the program join them, and removes them. Without control groups, the monitor enforces the limits by looking at the processes.
This module uses only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

CONTROLLERS = ("memory", "pids")
MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")  # of version 2, of version 1
# In version 1, a program gets as much time on each CPU as one other process, however many processes it has.
SHARES_OF_A_PROCESS = 1024
REMOVE_S = 5.0
_TRIAL_S = 10.0


def parents() -> dict[str, str]:
    """Return the folders in which this process can make groups, by controller, with "kill" for cgroup.kill. Each was tried.
    "cpu" is only named with version 1. With version 2, a group has its own share of the CPU if its parent gives it one."""
    found: dict[str, str] = {}
    for version, controllers, folder in _own_groups():
        above = folder
        while (
            version == 2 and not set(CONTROLLERS) <= _words(f"{above}/cgroup.subtree_control") and above.count("/") > 3
        ):
            above = os.path.dirname(above)
        has = (
            set(CONTROLLERS) & _words(f"{above}/cgroup.subtree_control")
            if version == 2
            else {*CONTROLLERS, "cpu"} & controllers
        )
        at = above if has else folder
        if (has - set(found) or version == 2) and _works(at, has):
            found |= dict.fromkeys(has - set(found), at) | ({"kill": at} if version == 2 else {})
    return found


def sweep(folders: Sequence[str], was_left: Callable[[str], bool]) -> None:
    """Remove the groups of processes that have ended. `was_left`: takes a group's name."""
    for folder in folders:
        for name in _entries(folder):
            path = os.path.join(folder, name)
            if was_left(name.partition(".")[0]) and _is_ours(path):
                Groups([path]).remove()


def _is_ours(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.getuid()
    except FileNotFoundError:  # another process removes the same groups
        return False


class Groups:
    """The control groups of one program, in one or more hierarchies."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(dict.fromkeys(paths))

    def make(self, memory_bytes: int, tasks: int) -> None:
        """Raises OSError."""
        for path in self._paths:
            os.mkdir(path, 0o755)
            for name in MEMORY_FILES:
                _write(f"{path}/{name}", memory_bytes)
            _write(f"{path}/memory.swap.max", 0)
            _write(f"{path}/memory.memsw.limit_in_bytes", memory_bytes)
            _write(f"{path}/memory.oom.group", 1)
            _write(f"{path}/pids.max", tasks)
            _write(f"{path}/cpu.shares", SHARES_OF_A_PROCESS * (os.cpu_count() or 1))

    def join(self) -> None:
        """Move this process into the groups. Raises OSError."""
        for path in self._paths:
            with open(f"{path}/cgroup.procs", "w") as file:
                file.write("0")

    def processes(self) -> int:
        """The number of processes in the groups: one read, which is fast even if there are thousands. 0 without groups."""
        return len(_words(f"{self._paths[0]}/cgroup.procs")) if self._paths else 0

    def limit(self) -> str | None:
        """The limit that the kernel has enforced so far, or None."""
        for path in self._paths:
            if _count(f"{path}/memory.events", "oom_kill") or _count(f"{path}/memory.oom_control", "oom_kill"):
                return "memory"
            if _count(f"{path}/pids.events", "max"):
                return "processes"
        return None

    def end(self) -> None:
        """Kill every process in the groups, also those with another parent. They cannot fork any more."""
        for path in self._paths:
            _write(f"{path}/pids.max", 0)
        for path in [path for path in self._paths if not _write(f"{path}/cgroup.kill", 1)]:
            for pid in _words(f"{path}/cgroup.procs"):
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def remove(self) -> None:
        """Remove the groups, and kill the processes in them. Does nothing if they do not exist."""
        until = time.monotonic() + REMOVE_S
        while (left := [path for path in self._paths if os.path.isdir(path)]) and time.monotonic() < until:
            self.end()
            for path in left:
                try:
                    os.rmdir(path)
                except OSError:  # what was killed has not gone yet
                    time.sleep(0.005)


def _own_groups() -> list[tuple[int, set[str], str]]:
    """Version, controllers and folder of each group that this process is in."""
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split() for line in file]
        with open("/proc/self/cgroup") as file:
            own = [line.strip().split(":", 2) for line in file]
    except OSError:
        return []
    found = []
    for fields in mounts:
        root, at = fields[3], fields[4]
        kind, options = fields[fields.index("-") + 1], set(fields[-1].split(","))
        for _, names, path in own if kind in ("cgroup", "cgroup2") else ():
            of_mount = not names if kind == "cgroup2" else bool(names) and set(names.split(",")) <= options
            if of_mount and f"{path}/".startswith(f"{root.rstrip('/')}/"):
                below = path[len(root.rstrip("/")) :].rstrip("/")
                found.append((2 if kind == "cgroup2" else 1, set(names.split(",")), f"{at}{below}"))
    return found


def _works(folder: str, controllers: set[str]) -> bool:
    """A group can be made there, be bounded, be joined by a child of this process, and be removed."""
    path = os.path.join(folder, f"atropos-trial-{os.getpid()}-{time.monotonic_ns()}")
    try:
        os.mkdir(path)
    except OSError:
        return False
    try:
        bounds = [name for name in (*MEMORY_FILES, "pids.max", "cpu.shares") if os.path.exists(f"{path}/{name}")]
        if len(bounds) < len(controllers) or not all(os.access(f"{path}/{name}", os.W_OK) for name in bounds):
            return False
        joins = ["sh", "-c", 'echo 0 > "$1/cgroup.procs"', "sh", path]
        return not subprocess.run(joins, stderr=subprocess.DEVNULL, timeout=_TRIAL_S, check=False).returncode
    finally:
        Groups([path]).remove()


def _entries(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name))]
    except OSError:
        return []


def _words(path: str) -> set[str]:
    try:
        with open(path) as file:
            return set(file.read().split())
    except OSError:
        return set()


def _count(path: str, name: str) -> int:
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.split()[0] == name), 0)
    except OSError:
        return 0


def _write(path: str, value: int) -> bool:
    """False: this hierarchy or this kernel has no such file."""
    try:
        with open(path, "r+") as file:
            file.write(str(value))
    except OSError:
        return False
    return True
