"""One call of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import httpx

from atropos_core.errors import ApiError, ConfigError

TEMPORARY = frozenset({408, 409, 425, 429})  # and 5xx: another try may succeed


class CallFailed(ApiError):
    """A call without an answer that can be used. Its message is the cause, and never shows the key."""

    def __init__(self, cause: str, *, status: int | None = None, retry_after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.status = status  # None: no answer came
        self.retry_after_s = retry_after_s  # what the server asks for
        self.is_temporary = status is None or status in TEMPORARY or status >= 500


class ChatClient:
    """A client of the server whose address, up to /v1, is `url`."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        timeout_s: float | None = None,
        connections: int = 100,
        watched: Callable[[str], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """`timeout_s`: for one call, from connecting to the last byte. `watched`: is entered around each call, with its name, such as
        `GET /models`; it may report a silent server."""
        self.url = url.rstrip("/").removesuffix("/chat/completions")
        self._key = key
        self._timeout_s = timeout_s
        self._watched = watched
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=None,
        )

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`, which begins with a slash. Raises CallFailed, and what `watched` raises."""
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object that answers `body`. Raises like `get`."""
        return await self._call("POST", path, body)

    def reply_text(self, answer: Mapping[str, Any]) -> str:
        """Return the text of a chat completion's first choice, "" if it has none. Raises CallFailed if it is not a chat completion."""
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (LookupError, TypeError) as error:
            shown = self.without_key(str(answer)[:300])
            raise CallFailed(f"the answer is not a chat completion: {shown}", status=200) from error

    async def close(self) -> None:
        await self._http.aclose()

    def without_key(self, text: str) -> str:
        """Return the text without the key, which some servers repeat when they refuse it."""
        return text.replace(self._key, "[the key]") if self._key else text

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s), self._watched(f"{method} {path}"):
                answer = await self._http.request(method, self.url + path, json=body)
        except TimeoutError:
            raise CallFailed(f"no answer within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise CallFailed(self.without_key(f"{type(error).__name__}: {error}")) from error
        text = self.without_key(answer.text)
        if answer.status_code != 200:
            raise CallFailed(
                f"status {answer.status_code}: {text[:300]}",
                status=answer.status_code,
                retry_after_s=_seconds(answer.headers.get("retry-after", "")),
            )
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CallFailed(f"the answer is not a JSON object: {text[:200]!r}", status=200)
        return found


def read_key(variable: str, option: str) -> str:
    """Return the key in this environment variable, which `option` names. Raises ConfigError if it is not set."""
    if key := os.environ.get(variable):
        return key
    raise ConfigError(
        f"{option} names the environment variable {variable}, which is not set.", remedy=f"export {variable}=..."
    )


def _seconds(text: str) -> float:
    """Return the seconds of a `retry-after` header, or 0 if it is a date."""
    try:
        return max(float(text), 0.0)
    except ValueError:
        return 0.0
