"""Programs that a sandbox must survive: what each does, the limits that it is given, and how it must end.

Each also has its own limit (a minute, or a number of processes), so that a sandbox without protection harms no machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

MB = 1 << 20

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", "MARK"])
    os._exit(0)
os.wait()
time.sleep(0.3)
"""
FORKS = """
import os, time
ours = 0
while ours < 300:
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    ours += 1
    time.sleep(0.002)
time.sleep(60)
"""
DISK = """
import time
for number in range(200):
    with open(f"{number}.bin", "wb") as file:
        file.write(b"x" * 1_000_000)
    time.sleep(0.005)
time.sleep(60)
"""
ONE_FILE = """
import time
try:
    with open("one.bin", "wb") as file:
        for _ in range(200):
            file.write(b"x" * 1_000_000)
except OSError:
    pass
time.sleep(60)
"""
NAMELESS = """
import os, time
file = open("gone.bin", "wb")
os.unlink("gone.bin")
for _ in range(38):
    file.write(b"x" * 1_000_000)
other = open("other.bin", "wb")
os.unlink("other.bin")
for _ in range(38):
    other.write(b"x" * 1_000_000)
file.flush(), other.flush()
time.sleep(60)
"""
MEMFD = """
import os, time
descriptor = os.memfd_create("held")
for _ in range(250):
    os.write(descriptor, b"x" * 1_000_000)
    time.sleep(0.002)
time.sleep(60)
"""
MEMORY = """
import time
held = []
for _ in range(400):
    held.append(b"x" * 1_000_000)
    time.sleep(0.005)
time.sleep(60)
"""
PRINTS = """
import os
line = b"x" * 100_000
for _ in range(10_000):
    os.write(1, line)
"""
DEAF = """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("still here", flush=True)
time.sleep(60)
"""


@dataclass(frozen=True)
class Poisoned:
    text: str
    limits: dict[str, Any] = field(default_factory=dict)
    limit: str | None = None  # that it is ended for
    code: int | None = None
    left_running: int | None = None

    def argv(self, mark: str, python: str = sys.executable) -> list[str]:
        return [python, "-S", "-c", self.text.replace("MARK", mark), mark]


POISONED = {
    "leaves a daemon": Poisoned(DAEMON, code=0, left_running=1),
    "forks without end": Poisoned(FORKS, {"processes": 40}, "processes"),
    "fills the disk with many files": Poisoned(DISK, {"disk_bytes": 40 * MB}, "disk"),
    "fills the disk with one file": Poisoned(ONE_FILE, {"disk_bytes": 40 * MB}, "disk"),
    "fills the disk with files without a name": Poisoned(NAMELESS, {"disk_bytes": 40 * MB}, "disk"),
    "fills memory that has a file's form": Poisoned(MEMFD, {"memory_bytes": 100 * MB}, "memory"),
    "holds memory without end": Poisoned(MEMORY, {"memory_bytes": 100 * MB}, "memory"),
    "prints a gigabyte": Poisoned(PRINTS, {"output_bytes": MB}, "output"),
    "never ends and ignores signals": Poisoned(DEAF, {"wall_time_s": 1.0}, "wall_time"),
}
