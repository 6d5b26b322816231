"""OpenAI clients that an environment file opens itself: if their URL is the policy's, the policy answers them.

Requests are answered inside this process, which knows their group. They are intercepted below openai's clients, at the transports of
httpx. Other URLs are left as they are: a judge elsewhere stays there.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from atropos_core.errors import AtroposError
from atropos_env_atroposlib.standins.servers import APIServer, APIServerConfig

POLICY_URL = "http://policy.invalid/v1"  # a name that no network has (RFC 2606)
NO_KEY = "the-policy-takes-no-key"
BLOCKING_DEADLINE_S = 3600.0  # the rollout's own deadline is shorter
HERE = frozenset({"localhost", "127.0.0.1", "0.0.0.0", "::1"})


def offer_default() -> None:
    """Make the policy answer clients without URL and key, unless the user's own variables say where these go."""
    if not os.environ.keys() & {"OPENAI_API_KEY", "OPENAI_BASE_URL"}:
        os.environ |= {"OPENAI_API_KEY": NO_KEY, "OPENAI_BASE_URL": POLICY_URL}


class OwnClients:
    """`answered`: the policy's URLs that received a request."""

    def __init__(self, servers: Any, named: Iterable[str]) -> None:
        """The policy's URLs are those of the file's configured servers on this machine, and the `named` ones."""
        configured = [str(getattr(one, "base_url", None) or "") for one in _listed(servers)]
        here = (url for url in configured if urlsplit(url).hostname in HERE)
        self._urls = {url.rstrip("/") for url in (*here, *named, POLICY_URL)}
        self.answered: set[str] = set()
        self._loop = asyncio.get_running_loop()
        for name in ("httpx", "httpx2"):  # older openai clients use one, newer ones the other
            try:
                self._redirect(importlib.import_module(name))
            except ModuleNotFoundError:
                continue

    def _redirect(self, library: ModuleType) -> None:
        send_async, send = library.AsyncHTTPTransport.handle_async_request, library.HTTPTransport.handle_request

        async def handle_async_request(transport: Any, request: Any) -> Any:
            if (path := self._path(str(request.url))) is None:
                return await send_async(transport, request)
            return _response(library, request, *await _answer(path, await request.aread()))

        def handle_request(transport: Any, request: Any) -> Any:
            if (path := self._path(str(request.url))) is None:
                return send(transport, request)
            return _response(library, request, *self._from_thread(path, request.read()))

        library.AsyncHTTPTransport.handle_async_request = handle_async_request
        library.HTTPTransport.handle_request = handle_request

    def _path(self, url: str) -> str | None:
        """The path after the policy's URL; None for any other URL."""
        for base in self._urls:
            if url.startswith(f"{base}/"):
                self.answered.add(base)
                return url[len(base) :].partition("?")[0]
        return None

    def _from_thread(self, path: str, body: bytes) -> tuple[int, Any]:
        """Answer a blocking client. If it blocks the event loop's own thread, it would wait for itself, so it is refused."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            answer = asyncio.run_coroutine_threadsafe(_answer(path, body), self._loop)
            return answer.result(BLOCKING_DEADLINE_S)
        return _refused("a client that blocks was used in a coroutine: use AsyncOpenAI there, or asyncio.to_thread.")


def _listed(servers: Any) -> list[Any]:
    return servers if isinstance(servers, list) else [servers]


async def _answer(path: str, body: bytes) -> tuple[int, Any]:
    """Status and JSON."""
    if path == "/models":
        return 200, {
            "object": "list",
            "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "policy"}],
        }
    given = json.loads(body or b"{}")
    server = APIServer(APIServerConfig(model_name=str(given.get("model", "policy"))))
    calls: dict[str, Any] = {"/chat/completions": server.chat_completion, "/completions": server.completion}
    call = calls.get(path)
    if call is None or given.get("stream"):
        return _refused(f"the policy answers chat and text completions, not streamed; this is {path}.")
    try:
        return 200, (await call(**given)).model_dump(mode="json")
    except (AtroposError, TypeError) as error:
        return _refused(str(error))


def _refused(why: str) -> tuple[int, Any]:
    return 400, {"error": {"message": why, "type": "invalid_request_error", "code": None, "param": None}}


def _response(library: ModuleType, request: Any, status: int, body: Any) -> Any:
    return library.Response(status, json=body, request=request)
