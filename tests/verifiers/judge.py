"""A model elsewhere: an endpoint of this machine that gives one answer, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Any] = []


@contextmanager
def judging(answer: str) -> Iterator[Judge]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            judge.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            message = {"role": "assistant", "content": answer}
            body = json.dumps(
                {
                    "id": "1", "object": "chat.completion", "created": 0, "model": "judge",
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
            ).encode()  # fmt: skip
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judge = Judge(f"http://127.0.0.1:{server.server_port}/v1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
