"""One process, forked as a child of this one's parent, which then is what `python -m MODULE` would have been."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import signal
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

SYS_CLONE = 56  # x86_64
CLONE_PARENT, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID = 0x8000, 0x1000000, 0x200000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40
HUGE, MADV_COLLAPSE = 1 << 21, 25
HIGH = 512  # descriptors wait here for their places
_api = ctypes.PyDLL(None, use_errno=True)


def fork_sibling() -> int:
    """os.fork(), but the new process is a child of our parent. What glibc's fork() does besides, in a process without other
    threads, is to note the new thread's id, which the kernel does here."""
    noted_at = ctypes.c_void_p()
    if _api.prctl(PR_GET_TID_ADDRESS, ctypes.byref(noted_at), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_GET_TID_ADDRESS")
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    _api.PyOS_BeforeFork()
    pid: int = _api.syscall(ctypes.c_long(SYS_CLONE), ctypes.c_long(flags), None, None, noted_at, None)
    if pid == 0:
        _api.PyOS_AfterFork_Child()
    else:
        _api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def end_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent ends."""
    _api.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(3)


def become(wanted: Mapping[str, Any], received: Sequence[int]) -> None:
    """Everything that a new program gets from who starts it."""
    *others, network = received
    if os.readlink("/proc/self/ns/net") != wanted["network"]:
        enter_network(network)
    take_descriptors(wanted["descriptors"], others)
    if wanted["new_session"]:
        os.setsid()
    os.umask(wanted["umask"])
    os.chdir(wanted["directory"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    reset_signals(wanted["ignored"], wanted["blocked"])
    name_process(wanted["command"])
    reopen_streams()
    tempfile.tempdir = None
    front = wanted["in_front"]
    sys.path[:] = [wanted["directory"], *front, *(one for one in sys.path[1:] if one not in front)]
    sys.path_importer_cache.clear()
    sys.argv[:] = ["-m", *wanted["command"][3:]]
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        set_openmp_threads(int(threads))


def enter_network(descriptor: int) -> None:
    """Of the thread that calls this."""
    if _api.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def set_openmp_threads(threads: int) -> None:
    """What OpenMP would have read from OMP_NUM_THREADS as it was loaded, with torch. (torch.set_num_threads begins threads.)"""
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libgomp" in line or "libiomp" in line}
    for library in loaded:
        ctypes.CDLL(library).omp_set_num_threads(threads)


def take_huge_pages() -> None:
    """What this process has in memory of its own, where the kernel can (6.1, MADV_COLLAPSE): a fork copies and an end takes apart one
    entry for 2 MiB in place of 512."""
    with open("/proc/self/maps") as maps:
        lines = maps.read().splitlines()
    for line in lines:
        where, flags, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(one, 16) for one in where.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if flags == "rw-p" and inode == "0" and end > start:
            _api.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def take_descriptors(targets: Sequence[int], received: Sequence[int]) -> None:
    waiting = [fcntl.fcntl(one, fcntl.F_DUPFD, HIGH) for one in received]
    os.closerange(0, HIGH)
    for target, one in zip(targets, waiting, strict=True):
        os.dup2(one, target, inheritable=True)
    for one in waiting:
        os.close(one)


def reset_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does when it starts
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def reopen_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for at, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            raw = open(at, mode + "b", closefd=False)  # noqa: SIM115 - it lives as long as the process
        except OSError:  # it was closed
            stream = None
        else:
            errors = "backslashreplace" if name == "stderr" else getattr(sys.__stdin__, "errors", "strict")
            lines = not unbuffered and (name == "stderr" or raw.isatty())
            stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=lines, write_through=unbuffered)
            stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


PR_SET_MM, PR_SET_MM_MAP = 35, 14
ROOM: list[int] = []  # the addresses of the first and last byte that hold the process's name; forks inherit them


def name_process(command: Sequence[str]) -> None:
    """Set the command line that `ps` shows. The words go to the end of the room for the process's name, which the template got long
    arguments to enlarge; the kernel is told that they begin there (prctl(2), PR_SET_MM_MAP). If it refuses, the rest is slashes."""
    fields = [int(one) for one in open("/proc/self/stat").read().rpartition(")")[2].split()[1:]]  # noqa: SIM115
    if not ROOM:
        ROOM.extend(fields[44:46])
    start, end = ROOM
    words = b"\0".join(word.encode() for word in command) + b"\0"
    if len(words) > end - start:
        return
    ctypes.memmove(start, b"/" * (end - start - len(words)) + words, end - start)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    code, stack, data, environment = fields[22:24], fields[24], fields[41:43], fields[46:48]
    places = [*code, *data, fields[43], libc.sbrk(0), stack, end - len(words), end, *environment]
    wanted = struct.pack("11QQIi", *places, 0, 0, -1)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, wanted, ctypes.c_ulong(len(wanted)), 0)
