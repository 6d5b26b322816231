"""One scripted model in two forms: behind HTTP as atroposlib's clients speak to vLLM, and as the policy of a run.

What it says depends on the last text between << and >>, and on how often that was asked or, in a later turn, on its reply before.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Message, Sampling, Tokens


class Script:
    """Ids and logprobs of each reply."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = ChatTokenizer(model)
        self._asked: Counter[str] = Counter()

    def replies(self, prompt: Tokens, n: int) -> list[tuple[Tokens, str]]:
        """Ids, and why each ended: a key that ends with "-" has replies that are cut off."""
        text = self.tokenizer.decode(prompt)
        key = re.findall(r"<<(.*?)>>", text)[-1]
        if before := re.findall(r"reply (\d+) to", text):  # a later turn goes on with the number of its history
            first = int(before[-1])
        else:
            first, self._asked[key] = self._asked[key], self._asked[key] + n
        texts = [f"reply {at} to {key}" for at in range(first, first + n)]
        end = "" if key.endswith("-") else self.tokenizer.eos
        return [(self.tokenizer.encode(text + end), "stop" if end else "length") for text in texts]

    @staticmethod
    def logprob(token: int) -> float:
        return -(token % 64) / 64  # which 32 bits hold


class ScriptedPolicy(Policy):
    def __init__(self, model: Path) -> None:
        self.sampling = Sampling(max_tokens=64)
        self._script = Script(model)

    async def render(self, messages: Sequence[Message], **more: Any) -> Tokens:
        return self._script.tokenizer.render(messages)

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return self._script.tokenizer.parse(tokens, prompt)

    async def sample(self, prompt: Tokens, *, n: int = 1, **more: Any) -> list[Completion]:
        made = self._script.replies(prompt, n)
        return [
            Completion(
                ids, np.array([Script.logprob(int(t)) for t in ids], np.float32), np.zeros(len(ids), np.int32), why, 1.0
            )
            for ids, why in made
        ]


class ScriptedServer:
    """`url` ends in /v1; `/generate` beside it gives ids, as vLLM's example server does."""

    def __init__(self, model: Path) -> None:
        script, lock = Script(model), threading.Lock()

        def answer(path: str, call: dict[str, Any]) -> dict[str, Any]:
            tokenizer, n = script.tokenizer, call.get("n") or 1
            if path == "/generate":
                made = script.replies(np.array(call["prompt"]["prompt_token_ids"]), n)
                rows = [[[{str(token): Script.logprob(int(token))}] for token in ids] for ids, _ in made]
                return {"logprobs": rows, "finish_reasons": [why for _, why in made]}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": "x", "created": 0, "model": "scripted", "usage": usage}
            if path == "/v1/chat/completions":
                said = [
                    {"message": {"role": "assistant", "content": tokenizer.decode(ids)}, "finish_reason": why}
                    for ids, why in script.replies(tokenizer.render(call["messages"]), n)
                ]
                return head | {"object": "chat.completion", "choices": _numbered(said)}
            made = script.replies(tokenizer.encode(call["prompt"]), n)
            texts = [{"text": tokenizer.decode(ids), "finish_reason": why} for ids, why in made]
            return head | {"object": "text_completion", "choices": _numbered(texts)}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({})

            def do_POST(self) -> None:
                call = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    self._send(answer(self.path, call))

            def _send(self, value: dict[str, Any]) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _numbered(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"index": at, **one} for at, one in enumerate(choices)]
