"""Count files of the tests in /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tests.shared_memory import SHM, SharedFiles

HOLDS = "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); print(flush=True); time.sleep(60)"


SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""


def test_a_semaphore_that_a_killed_process_leaves_is_found():
    files = SharedFiles()
    with subprocess.Popen([sys.executable, "-c", SEMAPHORE], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        name = f"sem.{holder.stdout.readline().strip().lstrip('/')}"
        files.look()
        [tracker] = psutil.Process(holder.pid).children()
        tracker.kill()
        holder.kill()
    try:
        assert files.left() == {name}
    finally:
        (SHM / name).unlink()


def test_what_a_killed_process_of_ours_had_is_found_and_what_another_leaves_is_not():
    mine, other = (SHM / f"atropos-test-{os.getpid()}-{whose}" for whose in ("mine", "other"))
    files = SharedFiles()
    try:
        for file in (mine, other):
            file.write_bytes(bytes(64))
        with subprocess.Popen([sys.executable, "-c", HOLDS, mine], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline()
            files.look()
            assert not files.left(), "a living process has it"
            holder.kill()
        assert files.left() == {mine.name}
        mine.unlink()
        assert not files.left()
    finally:
        for file in (mine, other):
            file.unlink(missing_ok=True)
