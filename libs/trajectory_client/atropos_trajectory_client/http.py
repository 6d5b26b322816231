"""Calls to the trajectory API over HTTP: codec frames in both directions, errors with their own classes, retries until a deadline."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from atropos_core import console, errors
from atropos_core.codec import PREFIX_BYTES, decode, encode_bytes, frame_size
from atropos_core.errors import ApiError, AtroposError, ConfigError, HubClosed, TooLarge
from atropos_core.guards.patience import DEFAULT_PATIENCE, LOOK_S, Patience
from atropos_core.observe.profile import Profile

CONTENT_TYPE = "application/x-atropos"
GROUP_FRAMES = 2  # the format of groups: 2 is one array per column; servers that do not report a number only read rows
DAMAGED = "damaged"  # why a trainer or a server drops groups: their contents cannot be trained
OTHER_TIMELINE = "other_timeline"  # why a trainer drops groups: their weights are newer than its own
NOT_WANTED = (1 << 63) - 1  # in place of a group's id: another rollout of its draw was sooner, or no trainer wants it
LONG_POLL_S = 20.0  # one request's share of a longer wait
_BACKOFF_S = (0.05, 2.0)  # the first pause between two tries, and the longest
BEAT_S = 5.0  # an answer that comes piece by piece says so often that its sender is alive
_PROBE_S = 5.0
_LAST_S = 0.1  # with no more left than this, a failed try was the last


class UnknownThere(ApiError):
    """The server does not know something that a call names, for example a worker after the server was restarted."""


class _Busy(ApiError):
    """A proxy, or the server before it reads a request, has no room now."""


class _Overdue:
    """A call without an answer yet, and the time since when it is overdue."""

    def __init__(self, what: str, since: float, limit: asyncio.Timeout | None = None) -> None:
        self.what = what
        self.since = since
        self.limit = limit  # of a call that may take long; brought forward if the server answers nothing else either
        self.silent_since: float | None = None
        self.given_up = False


class Api:
    """One server, by its URL. Raises the server's own errors with their own classes, AccessRefused without the right token, and
    ApiError if no answer comes before a call's deadline."""

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 30.0, profile: Profile | None = None,
        patience: Patience = DEFAULT_PATIENCE,
    ) -> None:  # fmt: skip
        """`patience`: how long a server may be silent, beyond what a call may take, before that is reported, and before a call that
        may take longer is given up."""
        self.patience = patience
        self._profile = profile
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._in_flight: set[_Overdue] = set()
        self._watching: asyncio.Task[None] | None = None
        self._reported_silent = False  # once for each silence
        try:
            parsed = httpx.URL(self.url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise httpx.InvalidURL("no http:// or https:// with a host")
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{url!r} is not an address of a trajectory API: {error}.", remedy="Give one like http://127.0.0.1:8000"
            ) from error
        headers = {"content-type": CONTENT_TYPE} | ({"authorization": f"Bearer {token}"} if token else {})
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=parsed.host not in ("127.0.0.1", "localhost", "::1"),  # no proxy to oneself
            verify=ssl.create_default_context() if parsed.scheme == "https" else False,
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        wait_s: float = 0.0,
        deadline_s: float | None = None,
        content: Any = None,
    ) -> Any:
        """Make a call like `_call`, and time it by its route, without numbers and names."""
        if self._profile is None:
            return await self._call(method, path, body, wait_s=wait_s, deadline_s=deadline_s, content=content)
        route = "-".join(part for part in path.split("?")[0].split("/")[2:] if part.isalpha())
        with self._profile.call(f"api/{method.lower()}-{route}"):
            return await self._call(method, path, body, wait_s=wait_s, deadline_s=deadline_s, content=content)

    async def _call(
        self, method: str, path: str, body: Any, *, wait_s: float, deadline_s: float | None, content: Any
    ) -> Any:
        """Make one call, and repeat it while the server is away, until `deadline_s` (by default this Api's timeout) beyond `wait_s`,
        which is how long the server itself may take. `content`: a callable that returns the raw body for each try, instead of
        `body`."""
        began = time.monotonic()
        until = began + wait_s + (self._timeout_s if deadline_s is None else deadline_s)
        frame = None if body is None else encode_bytes(body)
        pause = _BACKOFF_S[0]
        is_long = wait_s > LONG_POLL_S
        flight = _Overdue(f"{method} {path}", time.monotonic() + (0.0 if is_long else wait_s))
        while True:
            left = max(until - time.monotonic(), 0.001)
            try:
                async with asyncio.timeout(left) as limit:
                    flight.limit = limit if is_long else None
                    with self._watched(flight):
                        answer = await self._http.request(
                            method, path, content=content() if content else frame, timeout=wait_s + self._timeout_s
                        )
                return _value(answer, self.url)
            except (httpx.TransportError, TimeoutError, HubClosed, _Busy) as error:
                if _is_untrusted(error):
                    raise ApiError(
                        f"{self.url} shows a certificate that this machine does not trust: {reason(error)}.",
                        remedy="Name the authority that signed it: SSL_CERT_FILE=ca.pem atropos ...",
                    ) from error
                left = until - time.monotonic()
                if flight.given_up:
                    raise ApiError(
                        f"{self.url} has answered nothing for {self.patience.least_s:g} s, {method} {path} least of all: its process "
                        "is stopped or hangs, or it is out of reach.",
                        remedy="Look at its machine and its log. If it was only slow, raise watch.least_s.",
                    ) from error
                if left <= _LAST_S:
                    raise ApiError(
                        f"{method} {self.url}{path} got no answer in time: {reason(error)}.",
                        remedy="Is the server up (`atropos serve`), and can this machine reach it?",
                    ) from error
                if not self._reported_silent and until - left - began > self.patience.say_s / 4:
                    self._reported_silent = True
                    console.warn(
                        f"no answer from {self.url} yet: {reason(error)}. Trying on, for {left:.0f} s at most."
                    )
                await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left - _LAST_S / 2))
                if isinstance(error, httpx.ConnectError):  # refused, so the server is not silent
                    flight.since = time.monotonic() + (0.0 if is_long else wait_s)
                pause = min(2 * pause, _BACKOFF_S[1])

    async def stream(self, path: str, frame: bytes) -> AsyncGenerator[Any, None]:
        """Yield the values of an answer that comes frame by frame, with an empty one at least every BEAT_S. Raises ApiError when the
        other end is gone, or has sent nothing for as long as `patience` allows. Does not retry."""
        silent_s = max(self.patience.least_s, 3 * BEAT_S)
        limits = httpx.Timeout(silent_s, connect=min(silent_s, self._timeout_s))
        buffer = bytearray()
        flight = _Overdue(f"POST {path}", time.monotonic() + BEAT_S)
        self._watch(flight)
        try:
            async with self._http.stream("POST", path, content=frame, timeout=limits) as answer:
                if answer.status_code >= 300:
                    await answer.aread()
                    _value(answer, self.url)
                async for piece in answer.aiter_raw():
                    flight.since = time.monotonic() + BEAT_S
                    buffer += piece
                    while len(buffer) >= PREFIX_BYTES and len(buffer) >= (end := PREFIX_BYTES + frame_size(buffer)):
                        whole = bytes(memoryview(buffer)[:end])
                        del buffer[:end]
                        yield decode(whole)
        except httpx.HTTPError as error:
            raise ApiError(
                f"{self.url} went away during {path}: {reason(error)}.",
                remedy="Is it up, and can this machine reach it?",
            ) from error
        finally:
            self._in_flight.discard(flight)

    @contextmanager
    def _watched(self, flight: _Overdue) -> Iterator[None]:
        self._watch(flight)
        try:
            yield
            if self._reported_silent:
                self._reported_silent = False
                console.say(f"{self.url} answers again")
        finally:
            self._in_flight.discard(flight)

    def _watch(self, flight: _Overdue) -> None:
        self._in_flight.add(flight)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """While a call is in flight, report once that no answer comes. A short call shows if a long one is merely long."""
        while self._in_flight:
            say_s = self.patience.say_s
            await asyncio.sleep(min(LOOK_S, say_s / 8))
            now = time.monotonic()
            late = [flight for flight in self._in_flight if now - flight.since > say_s]
            long = [flight for flight in late if flight.limit is not None]
            if long and await self._answers():
                for flight in long:
                    flight.silent_since = None
                late = [flight for flight in late if flight not in long]
            for flight in late:
                flight.silent_since = flight.silent_since or now
                if flight.limit is not None and now - flight.silent_since > self.patience.least_s - say_s:
                    flight.given_up = True
                    flight.limit.reschedule(asyncio.get_running_loop().time())
            if late and not self._reported_silent:
                self._reported_silent = True
                console.warn(
                    f"{self.url} has given no answer to {late[0].what} for {now - late[0].since:.0f} s: its process may be "
                    "stopped or hang, or it is out of reach. Trying on."
                )

    async def _answers(self) -> bool:
        try:
            await self._http.get("/health", timeout=min(_PROBE_S, self.patience.least_s / 4))
        except httpx.HTTPError:
            return False
        return True

    async def about(self, deadline_s: float | None = None) -> dict[str, Any]:
        """Return the server's description: protocol, version, the trained policy, its offer of shared memory."""
        found: dict[str, Any] = await self.call("GET", "/v1/", deadline_s=deadline_s)
        if found.get("protocol") != 1:
            raise ApiError(f"{self.url} speaks protocol {found.get('protocol')}, and this program speaks 1.")
        return found

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.call("GET", "/v1/status")
        return found

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._http.aclose()


def _value(answer: httpx.Response, url: str) -> Any:
    if answer.status_code < 300:
        return decode(answer.content) if answer.content else None
    try:
        refusal = answer.json()["error"]
        kind, message, remedy = str(refusal["kind"]), str(refusal["message"]), refusal.get("remedy")
    except (ValueError, LookupError, TypeError, AttributeError):
        kinds = dict.fromkeys((502, 503, 504), _Busy) | {413: TooLarge}  # of something between here and the server
        raise kinds.get(answer.status_code, ApiError)(
            f"{url} answered {answer.status_code} to {answer.request.url.path}: {answer.text[:200]!r}"
        ) from None
    if answer.status_code == 404 and kind == "UnknownThere":
        raise UnknownThere(message, remedy=remedy)
    raise error_of(kind, message, remedy)


def error_of(kind: str, message: str, remedy: str | None) -> AtroposError | NotImplementedError:
    """Return the error that the other end reported."""
    if kind == "NotImplementedError":  # an answer that interfaces allow: callers do without
        return NotImplementedError(message)
    known = getattr(errors, kind, None)
    made = known if isinstance(known, type) and issubclass(known, AtroposError) else ApiError
    return made(message, remedy=remedy)


def _is_untrusted(error: BaseException | None) -> bool:
    """True if a certificate caused the error: trying again will not help."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__


async def in_background(work: Callable[[], Coroutine[Any, Any, None]], broken: asyncio.Future[None]) -> None:
    """Run `work` in the background, and pass its error to `broken`. The coroutine is made in this task's first step, so that a task
    that is cancelled before leaves no coroutine that was never awaited."""
    try:
        await work()
    except AtroposError as error:
        if not broken.done():
            broken.set_exception(error)
            broken.exception()  # mark as retrieved: there may be no waiter
