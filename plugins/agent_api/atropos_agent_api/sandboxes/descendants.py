"""Find, count and end the processes that a monitor's program has started, whatever their present parent.

A monitor is the nearest subreaper above them. What its program leaves behind (a daemon that forked twice and called setsid)
becomes the monitor's own child, so the tree below the monitor has all of them. Only the standard library: a monitor starts without
site-packages. Without /proc (macOS), `ps` is used, and a process that left both tree and process group is not found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from stat import S_ISREG
from typing import NamedTuple

HAS_PROC = os.path.exists("/proc/self/stat")
HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # some kernels are built without it
PAGE = os.sysconf("SC_PAGE_SIZE")
END_DEADLINE_S = 10.0
MOST_ENDED = 1000  # children to wait for at once: a program that forks without end may leave more all the time
IN_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "/dev/shm/")  # names of files that are not on a disk


class Process(NamedTuple):
    pid: int
    parent: int
    state: str  # "Z": ended, but not waited for
    resident_bytes: int
    threads: int = 1


class Deleted(NamedTuple):
    """The sizes of files that are open but no longer have a name."""

    disk_bytes: int
    memory_bytes: int
    descriptors: int  # open in all processes; counting ends above a bound


def descendants(group: int | None = None) -> list[Process]:
    """All processes below this one, parents before children. `group`: on machines without /proc, also its members."""
    return list(each_descendant(group))


def each_descendant(group: int | None) -> Iterator[Process]:
    """Yield what `descendants` returns. A caller can stop early if a program starts processes faster than they are found."""
    if not HAS_PROC:
        yield from _below(os.getpid(), list(listed_by_ps(group)))
    elif not HAS_CHILDREN:
        yield from _below(os.getpid(), [one for pid in _numbers("/proc") if (one := stat(pid)) is not None])
    else:
        waiting = list(_children(os.getpid()))
        for pid in waiting:  # the list grows during the loop
            if (process := stat(pid)) is not None:
                yield process
                waiting += _children(pid)


def end_descendants(group: int | None, statuses: dict[int, int]) -> bool:
    """Kill everything below this process, and wait until nothing is left. `group`: the process group that the program led, if its
    number is still its own. Adds the exit statuses of this process's own children to `statuses`, in the form of os.waitpid.
    Returns False if something was left at the deadline (a process of another user, or one that waits for a disk)."""
    until = time.monotonic() + END_DEADLINE_S
    if group is not None:
        _quietly(os.killpg, group, signal.SIGKILL)  # the kernel kills the whole group at once: a fork cannot escape
    while time.monotonic() < until:
        if _reaped_all(statuses):
            return True
        stopped: set[int] = set()
        while time.monotonic() < until:  # stopped processes cannot fork, so each round finds fewer
            found = [one for one in descendants(group) if one.state != "Z" and one.pid not in stopped]
            if not found:
                break
            for one in found:
                _send(one, signal.SIGSTOP)
                stopped.add(one.pid)
        for one in descendants(group):
            if one.state != "Z":
                _send(one, signal.SIGKILL)
        time.sleep(0.002)
    return False


def kill_descendants() -> None:
    """Kill what is below this process, once and without waiting for it."""
    for one in each_descendant(None):
        if one.state != "Z":
            _send(one, signal.SIGKILL)


def memory_bytes(processes: list[Process], files_bytes: int, bound: int) -> int:
    """The memory of the processes, with `files_bytes` of nameless files in memory. If the simple sum is above `bound`, it is computed
    again with shared pages, and pages of such a file, counted once."""
    total = sum(one.resident_bytes for one in processes) + files_bytes
    if total <= bound or not HAS_PROC:
        return total
    shares = [_proportional_bytes(one) for one in processes]
    return sum(all_ for all_, _ in shares) + max(files_bytes - sum(of_files for _, of_files in shares), 0)


def stat(pid: int) -> Process | None:
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may contain anything
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[21]) * PAGE, int(fields[17]))


def deleted_files(processes: list[Process], most_descriptors: int) -> Deleted:
    """Measure nameless files that the processes hold open or have mapped. Only root can measure a file that is mapped and not open."""
    sizes: dict[tuple[int, int], tuple[bool, int]] = {}
    descriptors = 0
    for one in processes:
        numbers = _numbers(f"/proc/{one.pid}/fd")
        descriptors += len(numbers)
        if descriptors > most_descriptors:
            break
        for number in numbers:
            _measure(f"/proc/{one.pid}/fd/{number}", sizes)
        for where in _deleted_mappings(one.pid):
            _measure(f"/proc/{one.pid}/map_files/{where}", sizes)
    on_disk, memory = (sum(size for of, size in sizes.values() if of is kind) for kind in (False, True))
    return Deleted(on_disk, memory, descriptors)


def _measure(path: str, sizes: dict[tuple[int, int], tuple[bool, int]]) -> None:
    try:
        found = os.stat(path)
        if found.st_nlink == 0 and S_ISREG(found.st_mode):
            sizes[found.st_dev, found.st_ino] = os.readlink(path).startswith(IN_MEMORY), found.st_blocks * 512
    except OSError:
        pass


def _deleted_mappings(pid: int) -> list[str]:
    """The addresses of one mapping of each file that no longer has a name."""
    found: dict[bytes, bytes] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                if line.endswith(b" (deleted)\n"):
                    where, _, _, device, inode, *_ = line.split(None, 5)
                    found.setdefault(device + b" " + inode, where)
    except OSError:
        pass
    return ["-".join(f"{int(end, 16):x}" for end in where.split(b"-")) for where in found.values()]


def _proportional_bytes(process: Process) -> tuple[int, int]:
    """The process's share of all memory that it has mapped, and its share of files in memory."""
    found = {}
    for line in _read(f"/proc/{process.pid}/smaps_rollup").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"Pss", b"Pss_Shmem"):
            found[name] = int(value.split()[0]) * 1024
    return found.get(b"Pss", process.resident_bytes), found.get(b"Pss_Shmem", 0)


def _send(process: Process, number: signal.Signals) -> None:
    """Signal the process if it is still the one that was found: its number may belong to another by now."""
    if not hasattr(os, "pidfd_open") or not HAS_PROC:
        return _quietly(os.kill, process.pid, number)
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    try:
        now = stat(process.pid)  # of the process behind the descriptor, or of none
        if now is not None and now.parent in (process.parent, os.getpid()):
            _quietly(signal.pidfd_send_signal, descriptor, number)
    finally:
        os.close(descriptor)


def _reaped_all(statuses: dict[int, int]) -> bool:
    """Wait for children that have ended. Returns True if none is left."""
    try:
        for _ in range(MOST_ENDED):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            statuses[pid] = status
    except ChildProcessError:
        return True
    return False


def _children(pid: int) -> Iterator[int]:
    for task in _numbers(f"/proc/{pid}/task"):
        yield from map(int, _read(f"/proc/{pid}/task/{task}/children").split())


def _below(top: int, everything: list[Process]) -> list[Process]:
    by_parent: dict[int, list[Process]] = {}
    for one in everything:
        by_parent.setdefault(one.parent, []).append(one)
    found = list(by_parent.get(top, []))
    for one in found:
        found += by_parent.get(one.pid, [])
    return found


def listed_by_ps(group: int | None) -> Iterator[Process]:
    """Every process but this one, without /proc. Members of `group` count as children of this process."""
    import subprocess

    listed = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,pgid=,stat=,rss="], capture_output=True, timeout=END_DEADLINE_S, check=False
    ).stdout
    for line in listed.splitlines():
        pid, parent, of_group, state, resident = line.split()[:5]
        if state.startswith(b"Z") or int(pid) == os.getpid():
            continue
        above = os.getpid() if group is not None and int(of_group) == group else int(parent)
        yield Process(int(pid), above, state[:1].decode(), int(resident) * 1024)


def _numbers(directory: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(directory) if name.isdecimal()]
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _quietly(send, target, number) -> None:  # type: ignore[no-untyped-def] # os.kill, os.killpg or signal.pidfd_send_signal
    try:
        send(target, number)
    except (ProcessLookupError, PermissionError):
        pass
