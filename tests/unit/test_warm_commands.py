"""What a warm command starts is warm as well."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from tests.warm import is_template


def test_a_command_that_starts_an_engine_has_a_template_for_it(request, tmp_path):
    if not request.config.getoption("--warm"):
        pytest.skip("no `pytest --warm`, as `make test` has")
    command = [sys.executable, "-m", "atropos_core", "engine", "--model", "tiny", "--port", "0"]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    try:
        until = time.monotonic() + 60
        while b"http://127" not in (tmp_path / "output").read_bytes():
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "output").read_text()
            time.sleep(0.05)
        templates = [is_template(child.pid) for child in psutil.Process(process.pid).children()]
        assert sorted(templates) == [False, True], "the engine, and what it was forked from"
    finally:
        process.terminate()
        process.wait(30)
