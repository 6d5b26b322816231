"""How each of our servers ends on SIGTERM: who waits hears so at once, with the same answer everywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.raw_http import Answer, Connection
from tests.served import atropos_serve, serving

GRACE_S = 60  # of the two whose grace can be set: who hears of the end only then has waited for it
HEARD_S = 9.0  # `atropos serve` gives the answers that are under way ten seconds
CALLED_S = 1.5  # a second after its head, the application is called for a request whose body is still to come
CALLS = {"server": "/scored_data", "engine": "/v1/engine/logprobs", "agents": "/v1/chat/completions"}
BODIES = {
    "length": b"content-length: 1000\r\n\r\n{",
    "chunks": b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    "gzip": b"content-encoding: gzip\r\ncontent-length: 1000\r\n\r\n\x1f\x8b",
}


def command(kind: str, folder: Path) -> Sequence[str]:
    if kind == "server":
        return atropos_serve("--dir", str(folder / "api"))
    module = {"engine": "tests.e2e.engine_endpoint", "agents": "tests.e2e.agents_endpoint"}[kind]
    return [sys.executable, "-m", module, "--grace-s", str(GRACE_S)]


@pytest.mark.parametrize("kind", CALLS)
def test_who_has_sent_half_a_body_hears_at_once_that_the_server_ends(kind: str, tmp_path: Path) -> None:
    with serving(command(kind, tmp_path), tmp_path / "output") as server:
        ends = [Connection(server.port) for _ in BODIES]
        for end, body in zip(ends, BODIES.values(), strict=True):
            end.send(f"POST {CALLS[kind]} HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode() + body)
        for end in ends:
            end.until_read()
        time.sleep(CALLED_S)
        began = time.monotonic()
        server.process.terminate()
        answers = [end.receive() for end in ends]
        heard_s = time.monotonic() - began
        assert server.process.wait(60) == 0
    assert list(map(_said, answers)) == [(503, True, True)] * len(BODIES)
    assert heard_s < HEARD_S
    assert "Traceback" not in (tmp_path / "output").read_text()


def _said(answer: Answer) -> tuple[int, bool, bool]:
    return answer.status, b"the server is ending" in answer.body, b"retry-after" in answer.head.lower()
