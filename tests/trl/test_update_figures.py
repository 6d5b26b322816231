"""The figures of TRL's update that `make gpu` prints, on a CPU and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "TRL_PYTHON" not in os.environ, reason="needs TRL in an environment of its own: `make test-export`"
    ),
]

MEASURED = """
import asyncio, json
from tests.gpu.training import Work, measured_trl
print(json.dumps(asyncio.run(measured_trl(Work("small", False, "cpu", 64)))))
"""


def test_an_update_of_trls_is_measured_where_it_is_installed() -> None:
    ended = subprocess.run(
        [os.environ["TRL_PYTHON"], "-c", MEASURED],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["tokens_s"] > 0
    assert 0.01 < found["allocated_gib"] < 16
