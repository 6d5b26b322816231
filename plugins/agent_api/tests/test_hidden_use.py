"""Memory, threads and descriptors that a program hides, under the kernel's control groups and without them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys

import psutil
import pytest

from atropos_agent_api.sandboxes import cgroups
from atropos_agent_api.sandboxes.descendants import deleted_files, stat
from atropos_agent_api.sandboxes.monitor import Monitor
from atropos_core.errors import SandboxError
from atropos_core.storage.tempdirs import owned_prefix
from plugins.agent_api.tests.sandboxes import NETWORK, opened, program, run
from tests.waiting import until

MB = 1 << 20
HIDES = """
import mmap, os, time
kept = []
for number in range(8):
    MAKE
    kept.append(mmap.mmap(file, 4096))
    os.close(file)
    time.sleep(0.2)
time.sleep(20)
"""
MAPPED = HIDES.replace("MAKE", "file = os.memfd_create('x')\n    for _ in range(30): os.write(file, b'x' * 1_000_000)")
UNLINKED = HIDES.replace(
    "MAKE",
    "file = os.open('gone', os.O_RDWR | os.O_CREAT); os.unlink('gone')\n    for _ in range(12): os.write(file, b'x' * 1_000_000)",
)
SHARED = """
import ctypes, mmap, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for number in range(8):
    at = libc.mmap(None, ctypes.c_size_t(30_000_000), 3, 0x21, -1, ctypes.c_long(0))
    ctypes.memset(at, 1, 30_000_000)
    libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t(30_000_000 - 4096))
    time.sleep(0.2)
time.sleep(20)
"""
IN_FLIGHT = """
import os, socket, time
pairs = []
for number in range(8):
    file = os.memfd_create('x')
    for _ in range(30): os.write(file, b'x' * 1_000_000)
    pairs.append(socket.socketpair())
    socket.send_fds(pairs[-1][0], [b'x'], [file])
    os.close(file)
    time.sleep(0.2)
time.sleep(20)
"""
THREADS = """
import threading, time
threading.stack_size(65536)
for number in range(3000):
    try:
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    except RuntimeError:
        time.sleep(0.05)
time.sleep(20)
"""
DESCRIPTORS = """
import os, resource, time
print(resource.getrlimit(resource.RLIMIT_NOFILE)[1], flush=True)
for child in range(10):
    if os.fork() == 0:
        try:
            while True: os.dup(0)
        except OSError:
            time.sleep(20)
        os._exit(0)
time.sleep(20)
"""
LIMITS = {"memory_bytes": 100 * MB, "disk_bytes": 60 * MB, "processes": 16, "wall_time_s": 12.0}
is_root = os.getuid() == 0
ATTACKS = {  # the program, the limit that ends it, and whether it does so without control groups
    "mapped memfd": (MAPPED, "memory", is_root),
    "rest of a shared mapping": (SHARED, "memory", is_root),
    "memfd in flight": (IN_FLIGHT, "memory", False),
    "unlinked file that is mapped": (UNLINKED, "disk", is_root),
    "threads": (THREADS, "processes", True),
    "descriptors": (DESCRIPTORS, "processes", True),
}


@pytest.mark.parametrize(  # a sandbox each: what counts is the same monitor's
    ("name", "with_groups"), [("process", False), ("bubblewrap", True)]
)
@pytest.mark.parametrize("kind", list(ATTACKS))
async def test_what_a_program_hides_is_counted(name, kind, with_groups, tmp_path):
    text, limit, by_looks = ATTACKS[kind]
    found = cgroups.parents()
    if with_groups and not {"memory", "pids"} <= set(found):
        pytest.skip("this process may not make control groups for memory and processes")
    if not by_looks and (limit == "disk" or not with_groups):
        pytest.skip("docs/agent-sandboxes.md: only the kernel, or root, sees it")
    async with opened(name) as sandbox:
        sandbox._group_parents = found if with_groups else {}
        wanted = program(tmp_path, [sys.executable, "-S", "-c", text], limits=LIMITS, network=NETWORK[name])
        ended, _ = await run(sandbox, wanted)
    assert ended.limit == limit, wanted.stderr.read_text()[-500:]
    assert ended.seconds < 10.0


async def test_a_program_within_its_limits_is_let_be_by_both(tmp_path):
    """It shares memory among processes, and has as many threads as it may."""
    text = (
        "import mmap, multiprocessing, os, threading, time\n"
        "shared = mmap.mmap(-1, 40_000_000); shared.write(b'x' * 40_000_000)\n"
        "for _ in range(5):\n    if os.fork() == 0: shared[:]; time.sleep(0.6); os._exit(0)\n"
        "threading.stack_size(65536)\n[threading.Thread(target=time.sleep, args=(0.6,)).start() for _ in range(100)]\ntime.sleep(0.6)\n"
    )
    for with_groups in (True, False):
        async with opened("process") as sandbox:
            sandbox._group_parents = None if with_groups else {}
            limits = {**LIMITS, "memory_bytes": 400 * MB}
            ended, _ = await run(
                sandbox, program(tmp_path, [sys.executable, "-S", "-c", text], limits=limits, network="host")
            )
        assert (ended.code, ended.limit) == (0, None)


def test_a_look_at_very_many_descriptors_ends_early():
    read, write = os.pipe()
    try:
        assert deleted_files([stat(os.getpid())] * 50, 100).descriptors < 100 + len(os.listdir("/proc/self/fd")) + 10
    finally:
        os.close(read), os.close(write)


DAEMON = "setsid env -i /bin/sh -c 'exec sleep 57' ROW & echo up; sleep 60"


@pytest.mark.parametrize(
    ("name", "network", "with_groups"),
    [("process", "host", True), ("process", "host", False), ("bubblewrap", "none", False)],
)
async def test_a_monitor_that_is_killed_leaves_no_process_that_took_off_its_mark(name, network, with_groups, tmp_path):
    async with opened(name) as sandbox:
        if not with_groups:
            sandbox._group_parents = {}
        before = set(psutil.pids())
        running = await sandbox.start(program(tmp_path, ["sh", "-c", DAEMON], network=network))
        while "up" not in (tmp_path / "one.stdout").read_text():
            await asyncio.sleep(0.01)

        def left():
            return [pid for pid in set(psutil.pids()) - before if _is_daemon(pid)]

        while not left():
            await asyncio.sleep(0.01)
        [monitor] = [one for one in psutil.Process().children() if "one" in one.cmdline()]
        monitor.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError, match="monitor of a program was killed"):
            await running.wait()
        await until(lambda: not left(), "the end of the daemon")
        await running.close()


def _is_daemon(pid: int) -> bool:
    try:
        return psutil.Process(pid).cmdline() == ["sleep", "57"]
    except psutil.Error:
        return False


@pytest.mark.skipif(not cgroups.parents(), reason="this process may not make control groups")
def test_groups_that_a_killed_run_left_are_removed_and_those_of_others_are_not(tmp_path):
    [parent, *_] = set(cgroups.parents().values())
    mark = secrets.token_hex(4)
    ours, others = f"{owned_prefix('sandbox')}{mark}.one", f"atropos-sandbox-1-2-3-{mark}.one"
    for name in (ours, others, f"{mark}-foreign"):
        os.mkdir(f"{parent}/{name}")
    try:
        cgroups.sweep([parent], lambda name: name == others.partition(".")[0])
        assert not os.path.exists(f"{parent}/{others}")
        assert os.path.exists(f"{parent}/{ours}") and os.path.exists(f"{parent}/{mark}-foreign")
    finally:
        for name in (ours, f"{mark}-foreign"):
            os.rmdir(f"{parent}/{name}")


def test_a_group_that_another_process_removes_at_the_same_moment_is_passed_over(tmp_path):
    (tmp_path / "left").mkdir()

    def was_left(name):
        (tmp_path / name).rmdir()
        return True

    cgroups.sweep([str(tmp_path)], was_left)


async def test_no_group_is_left_of_a_program_that_ended(tmp_path):
    async with opened("process") as sandbox:
        await run(sandbox, program(tmp_path, ["sh", "-c", "sleep 60 & exit 3"], network="host"))
        folder = sandbox.folder().name
        assert not [one for parent in cgroups.parents().values() for one in os.listdir(parent) if folder in one]


WORDS = [
    b"[" * 4000, b'{"event": ' * 300, b"\xff\xfe", b"null", b"1", b'{"event": "ended", "status": true}', b"",
    b'{"event": "ended", "status": 1e400}', b'{"event": "ended", "status": 99999999999999999999}', b'{"event": ["started"]}',
    b'{"event": "ended", "status": "0"}', b"9" * 4000, b'{"event": "ended"}',
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS, ids=lambda one: one[:12].decode(errors="replace"))
def test_whatever_the_first_process_inside_says_the_monitor_goes_on(word, tmp_path):
    supervisor, ours = socket.socketpair()
    inside, theirs = socket.socketpair()
    limits = {"processes": 1, "memory_bytes": MB, "disk_bytes": MB, "output_bytes": MB, "wall_time_s": 1.0}
    job = {"kind": "namespaces", "limits": limits, "groups": [], "api": None, "directory": str(tmp_path)}
    monitor = Monitor(supervisor, job, [b""])
    monitor._control, monitor._has_started = theirs, True
    with supervisor, ours, inside, theirs, open(os.devnull) as other:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(inside, [word + b"\n"], [other.fileno()])
        monitor._hear()
        assert monitor._reported is None
        inside.send(json.dumps({"event": "ended", "status": 3, "left_running": -1}).encode() + b"\n")
        monitor._hear()
        assert monitor._reported == {"status": 3, "left_running": None}
        assert len(os.listdir("/proc/self/fd")) == before, "what was sent is closed"
