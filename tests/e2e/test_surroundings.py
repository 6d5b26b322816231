"""Runs in odd surroundings, as real processes: terminals that close, stops, few descriptors, clocks, disks, old checkpoints."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atropos_core.launch.signals import TWICE_S
from tests.conftest import metrics_of
from tests.waiting import wait_until

SLOW = ("run", "--model", "toy", "--dir", "run", "--set", "evaluation.problems=0", "--set", "engine.latency_s=0.05",
        "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "checkpoint.every=3")  # fmt: skip

QUICK = ("--set", "engine.latency_s=0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atropos_core", *arguments]


class Terminal:
    """A command that a terminal of its own runs. `shell` lines run around it where a test wants a shell."""

    def __init__(self, folder: Path, argv: list[str], **environment: str) -> None:
        self.folder = folder
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "160", **environment}
            os.execv(argv[0], argv)
        self.printed = b""
        os.set_blocking(self.master, False)

    def read(self) -> str:
        try:
            while piece := os.read(self.master, 1 << 16):
                self.printed += piece
        except OSError:
            pass
        return self.printed.decode(errors="replace")

    def wait_for_step(self, step: int, deadline_s: float = 60) -> None:
        metrics, until = self.folder / "run/metrics.jsonl", time.monotonic() + deadline_s
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            self.read()
            assert time.monotonic() < until, self.read()
            time.sleep(0.02)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ends(self, deadline_s: float = 30) -> int:
        until = time.monotonic() + deadline_s
        while True:
            self.read()
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"did not end within {deadline_s} s:\n{self.read()}")
            time.sleep(0.02)


def last_checkpoint(folder: Path) -> int:
    return max(int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step-*"))


def test_a_terminal_that_closes_saves_and_ends_the_run(sevens, tmp_path):
    terminal = Terminal(tmp_path, command(*SLOW, "--env", sevens, "--steps", "5000", "--set", "checkpoint.every=0"))
    terminal.wait_for_step(2)
    os.close(terminal.master)
    assert terminal.ends() == 130
    steps = [line["step"] for line in metrics_of(tmp_path / "run")]
    assert last_checkpoint(tmp_path) == steps[-1] >= 2


def test_one_ctrl_c_saves_and_a_second_ends_at_once(sevens, tmp_path):
    terminal = Terminal(tmp_path, command(*SLOW, "--env", sevens, "--steps", "5000", "--set", "engine.latency_s=2"))
    terminal.wait_for_step(1)  # and the next has begun
    terminal.type(b"\x03")
    wait_until(lambda: "once more ends it at once" in terminal.read(), "the answer to Ctrl-C")
    terminal.type(b"\x03")  # with the first, for whoever presses it twice in a hurry
    time.sleep(TWICE_S + 0.2)
    if os.waitpid(terminal.pid, os.WNOHANG)[0] == 0:
        terminal.type(b"\x03")
        assert terminal.ends() == 130
    assert not (tmp_path / "run/summary.json").exists()


def test_a_run_that_was_stopped_by_ctrl_z_goes_on_as_if_no_time_had_passed(sevens, tmp_path):
    """For longer than the event loop may be blocked and a rollout may take."""
    bounds = ("--set", "training.rollout_deadline_s=2")
    run = " ".join(command(*SLOW, "--env", sevens, "--steps", "20", *bounds))
    script = f"{run}; echo stopped with $?; sleep 5; fg; echo ended with $?"
    terminal = Terminal(tmp_path, ["/bin/bash", "--norc", "-mc", script], ATROPOS_BLOCKED_AFTER_S="4")
    terminal.wait_for_step(3)
    terminal.type(b"\x1a")
    assert terminal.ends(60) == 0, terminal.read()
    printed = terminal.read()
    assert "stopped with 148" in printed and "ended with 0" in printed, printed
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert sum(line.get("rollouts/failed", 0) + line["groups/failed"] for line in lines) == 0, printed


def test_64_descriptors_a_pipe_that_nobody_reads_and_a_hangup_that_nohup_ignores_end_no_run(sevens, tmp_path):
    words = " ".join(command(*SLOW, "--env", sevens, "--steps", "8", "--set", "training.groups_per_step=32"))
    run = subprocess.Popen(["nohup", "/bin/bash", "-c", f"ulimit -n 64; exec {words}"], cwd=tmp_path, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    run.stderr.close()
    while not (tmp_path / "run/metrics.jsonl").exists():
        assert run.poll() is None
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.wait(60) == 0
    assert (tmp_path / "run/summary.json").is_file()


def test_a_stopped_supervisor_is_named_by_the_process_that_waits_for_it(sevens, tmp_path):
    run = subprocess.Popen(command(*SLOW, "--env", sevens, "--steps", "12"), cwd=tmp_path, text=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    assert run.stderr is not None
    while not (tmp_path / "run/metrics.jsonl").exists():
        time.sleep(0.02)
    [child] = psutil.Process(run.pid).children()
    child.suspend()
    printed = run.stderr.readline()
    child.resume()
    assert f"is stopped; to continue it: kill -CONT {child.pid}" in printed
    run.stderr.close()
    assert run.wait(60) == 0


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, at);
    if (which == CLOCK_REALTIME) at->tv_sec += (at->tv_nsec / 10000000) % 2 ? 86400 : -86400;
    return result;
}
"""

READ_ONLY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static int refused(const char *path) {  /* on the disk that READ_ONLY names, once its flag is there */
    char *disk = getenv("READ_ONLY"), flag[4096];
    snprintf(flag, sizeof flag, "%s.is_read_only", disk);
    if (strncmp(path, disk, strlen(disk)) || access(flag, F_OK)) return 0;
    errno = EROFS;
    return 1;
}
#define REAL(name) __typeof__(&name) real = dlsym(RTLD_NEXT, #name)
ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(write);
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0 && (path[n] = 0, refused(path))) return -1;
    return real(fd, bytes, size);
}
int open64(const char *path, int how, ...) {
    REAL(open64);
    va_list rest; va_start(rest, how); int mode = va_arg(rest, int); va_end(rest);
    if ((how & (O_WRONLY | O_RDWR)) && refused(path)) return -1;
    return real(path, how, mode);
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return refused(path) ? -1 : real(path, mode); }
int rename(const char *from, const char *to) { REAL(rename); return refused(to) ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return refused(path) ? -1 : real(path); }
int rmdir(const char *path) { REAL(rmdir); return refused(path) ? -1 : real(path); }
"""


def preloaded(folder: Path, source: str) -> str:
    """A library of which the functions come before libc's."""
    (folder / "first.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "first.so", "first.c", "-ldl"], cwd=folder, check=True)
    return str(folder / "first.so")


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a library that stands before libc")


@needs_cc
def test_a_clock_that_jumps_by_days_and_back_changes_nothing(atropos, sevens, tmp_path):
    clock = {"LD_PRELOAD": preloaded(tmp_path, CLOCK)}
    counting = "import time; print(len({time.time() // 86400 for _ in range(9) if not time.sleep(0.007)}))"
    jumps = subprocess.run([sys.executable, "-c", counting], env={**os.environ, **clock}, capture_output=True)
    assert int(jumps.stdout) > 1, "the clock of the test does jump"
    ended = atropos(*SLOW, *QUICK, "--env", sevens, "--steps", "6", **clock)
    assert ended.code == 0, ended.err
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert all(0 <= value < 60 for line in lines for name, value in line.items() if name.startswith("time/"))
    found = atropos("doctor", "run", **clock)
    assert "finished: all 6 steps" in found.out


@needs_cc
def test_a_disk_that_becomes_read_only_is_a_named_error_and_what_was_saved_is_whole(atropos, sevens, tmp_path):
    source = tmp_path / "sevens.py"
    source.write_text(source.read_text().replace('text.count("7") / 8', "len(text) / 8"))  # never all the same
    run = subprocess.Popen(
        command(*SLOW, "--env", sevens, "--steps", "5000"), cwd=tmp_path, text=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "LD_PRELOAD": preloaded(tmp_path, READ_ONLY), "READ_ONLY": str(tmp_path / "run")},
    )  # fmt: skip
    while not (tmp_path / "run/checkpoints/step-000003").exists():
        assert run.poll() is None
        time.sleep(0.02)
    (tmp_path / "run.is_read_only").touch()
    printed = run.communicate(timeout=60)[1]
    assert run.returncode == 1, printed
    assert "Read-only file system" in printed and "Traceback" not in printed, printed
    (tmp_path / "run.is_read_only").unlink()
    saved = last_checkpoint(tmp_path)
    ended = atropos("resume", "run", "--steps", str(saved + 2))
    assert ended.code == 0, ended.err


def test_missing_files_of_checkpoints_and_changed_code_are_named_at_a_resume(atropos, sevens, tmp_path):
    assert atropos(*SLOW, *QUICK, "--env", sevens, "--steps", "6").code == 0
    (tmp_path / "run/checkpoints/step-000006/policy/table.npy").unlink()
    source = tmp_path / "sevens.py"
    source.write_text(source.read_text().replace('text.count("7") / 8', 'text.count("7") / 4'))
    ended = atropos("resume", "run", "--steps", "7")
    assert ended.code == 0, ended.err
    assert "step-000006" in ended.err and "table.npy" in ended.err, "which file is not there"
    assert re.search(r"changed: the code behind environment\.\S+use\S* \(\S+sevens.py:Sevens\)", ended.out), ended.out
    (tmp_path / "run/checkpoints/step-000007/manifest.json").unlink()
    for path in (tmp_path / "run/checkpoints").glob("step-*/policy/table.npy"):
        path.unlink()
    ended = atropos("resume", "run", "--steps", "9")
    assert ended.code == 1
    assert "none of the 2 checkpoints" in ended.err and "manifest.json" in ended.err
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 7
