"""Requests to a vLLM server, with a deadline on each, and with Atropos errors for all failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from atropos_core.errors import AtroposError, DataError, DeadlineExceeded, RemoteError
from atropos_core.guards.patience import DEFAULT_PATIENCE, Patience
from atropos_server_watch.watch import ServerWatch

CALL_S = 30.0
PROBE_S = 5.0
_DEAD = "EngineCore encountered an issue"  # vLLM's EngineDeadError


class Refused(RemoteError):
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """One server's routes."""

    def __init__(
        self,
        url: str,
        key: str | None,
        lost: Callable[[str], Awaitable[AtroposError]],
        is_dying: Callable[[], bool] = lambda: False,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:
        """`patience`: a silent server is named in this process's log. The run shows the end of that log when it finds this process
        silent, and gives it up at its own bound."""
        self.url = url
        sooner = dataclasses.replace(patience, say_s=patience.say_s / 2)
        self.watch = ServerWatch(f"the vLLM server at {url}", sooner, needed=False)
        self._lost = lost  # makes the error for a server that does not answer, or says that its engine is dead
        self._is_dying = is_dying  # True if an error answer may be the first sign of that
        self._session = aiohttp.ClientSession(
            # Hundreds of requests wait at once. Idle connections go before vLLM closes them under us (5 s).
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def get(self, path: str, *, deadline_s: float = CALL_S) -> Any:
        return await self._call("GET", path, None, deadline_s, {})

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, deadline_s: float = CALL_S, may_fail: bool = False
    ) -> Any:
        """Return the answer's JSON, or its text. Raises DataError for a request that the server finds wrong (400), Refused for any
        other error status, DeadlineExceeded, and the error of `lost` if no answer comes.

        A cancelled or late request is aborted in the server: the connection closes. A request that `may_fail` there gets its own
        connection, because the server closes the connection of a request that raised, and the next request on it would be lost."""
        return await self._call("POST", path, body, deadline_s, {"Connection": "close"} if may_fail else {})

    async def answers(self) -> bool:
        """True if the server is up."""
        try:
            async with asyncio.timeout(PROBE_S), self._session.get(f"{self.url}/health") as response:
                return response.status < 400
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def close(self) -> None:
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float, headers: Mapping[str, str]
    ) -> Any:
        try:
            async with (
                asyncio.timeout(deadline_s),
                self.watch.call(path.partition("?")[0]),
                self._session.request(method, self.url + path, json=body, headers=headers) as response,
            ):
                raw = await response.read()
                status = response.status
        except TimeoutError:
            raise DeadlineExceeded(f"vLLM: {path} gave no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as error:
            raise await self._lost(f"{path}: {type(error).__name__}: {error}") from error
        try:
            answer = json.loads(raw) if raw else None
        except ValueError:
            answer = raw.decode(errors="replace")
        if status < 400:
            return answer
        message = f"vLLM: {path}: {_message(answer)}"
        if status >= 500 and (_DEAD in message or self._is_dying()):
            raise await self._lost(message)
        raise DataError(message) if status == 400 else Refused(f"{message} (HTTP {status})", status)


def _message(answer: Any) -> str:
    """vLLM answers {"error": {"message": ...}} or {"error": ...}, FastAPI {"detail": ...}."""
    if isinstance(answer, dict):
        found = answer.get("error", answer.get("detail", answer))
        return str(found.get("message", found)) if isinstance(found, dict) else str(found)
    return str(answer)
