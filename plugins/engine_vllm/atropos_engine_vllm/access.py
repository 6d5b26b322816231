"""Access to a server that the engine starts: every request needs its key. vLLM itself asks for it only under /v1 and /inference."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY_VARIABLE = "VLLM_API_KEY"


class OnlyOurs:
    """ASGI middleware (vLLM's `--middleware`): answers 401 to requests without the key."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # ASGI's own types are open mappings
        if scope["type"] in ("http", "websocket"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"this server belongs to a run of Atropos"})
                return
        await self._app(scope, receive, send)
