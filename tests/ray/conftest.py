"""These tests need Ray, in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.left_out import NONE_OF_THEM, stand_in

HERE = Path(__file__).parent
HAS_RAY = importlib.util.find_spec("ray") is not None

if not HAS_RAY:
    collect_ignore_glob = NONE_OF_THEM


pytest_collect_file = stand_in(__file__, "" if HAS_RAY else "Ray", "make test-ray")


class RunningCluster:
    """Three machines of one CPU core each: the head (resource "head"), and two with resources "first" and "second"."""

    def __init__(self, log: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"},
        )
        self.address = self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self._read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    made = RunningCluster(tmp_path_factory.mktemp("cluster") / "log")
    yield made
    made.close()
