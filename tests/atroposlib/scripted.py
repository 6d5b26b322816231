"""An OpenAI-compatible server with scripted answers: numbered replies, one after another."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """`url` is what a client takes as `base_url`."""

    def __init__(self) -> None:
        numbers = itertools.count()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                call = json.loads(self.rfile.read(int(self.headers["content-length"])))
                choices = [
                    {
                        "index": index,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": f"the answer is {next(numbers)}"},
                    }
                    for index in range(call.get("n") or 1)
                ]
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                body = json.dumps(
                    {"id": "x", "object": "chat.completion", "created": 0, "model": "scripted", "choices": choices,
                     "usage": usage}
                ).encode()  # fmt: skip
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
