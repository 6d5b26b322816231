"""The servers that benchmarks/api.py drives: atroposlib's own `run-api`, and `atropos serve` without and with journal."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.old_payloads import environment, trainer
from tests.raw_http import request
from tests.served import JSON, Server, atropos_serve, serving

UPSTREAM, OFF, ON = "upstream", "journal off", "journal on"
HUB_MB = 4096
BATCH = request("GET", "/batch")


@contextmanager
def started(kind: str, upstream: Path) -> Iterator[Server]:
    """One server of that kind with nothing in it. `upstream` is the Python that has atroposlib."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == UPSTREAM:
            command = [str(upstream), "-m", "atroposlib.cli.run_api"]
        else:
            command = atropos_serve("--dir", f"{folder}/api", "--hub-mb", str(HUB_MB))
            command += ["--no-journal"] if kind == OFF else []
        with serving(command, Path(folder) / "output") as server:
            yield server


def open_old(server: Server, batch_size: int, group_size: int) -> None:
    """A trainer, its first GET /batch (from which on environments may start), and environment 0."""
    assert server.call(request("POST", "/register", trainer(batch_size), **JSON)).status == 200
    assert server.call(BATCH).status == 200
    answer = server.call(request("POST", "/register-env", environment("bench", group_size), **JSON))
    assert b'"success"' in answer.body, answer.body
