"""Access to the server: by token if it is reachable from elsewhere, otherwise only from this machine.

Unmodified old clients can also give a token: aiohttp and requests send the password of `http://any:TOKEN@host:8000` as Basic
credentials.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_http_server.answers import Headers, header
from atropos_http_server.connection import SCOPE_KEY, Connection
from atropos_http_server.loopback import OWN_SITES, names_this_machine
from atropos_trajectory_api.http.answers import answer, plain_error

OPEN = "/health"


class Access:
    """ASGI middleware. With `token` None, it admits any process of this user (and root's) that uses a loopback name of this machine,
    but no page of a browser."""

    def __init__(self, app: ASGIApp, *, token: bytes | None, cors: Collection[str] = ()) -> None:
        self._token = token
        self._cors = frozenset(cors)
        self._app: ASGIApp = app
        self._preflight = CORSMiddleware(
            app, allow_origins=sorted(cors), allow_methods=["*"], allow_headers=["authorization", "content-type"]
        ) if cors else None  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are not served
        if (refused := self._refused(scope)) is not None:
            await refused(scope, send)
            return
        app = self._preflight if header(scope, b"origin") is not None and self._preflight is not None else self._app
        await app(scope, receive, send)

    def lets_through(self, scope: Scope) -> bool:
        """True if the application is called, and nothing is added to its answer."""
        return self._refused(scope) is None and (self._preflight is None or header(scope, b"origin") is None)

    def _refused(self, scope: Scope) -> Callable[[Scope, Send], Awaitable[None]] | None:
        """The answer that refuses this request; None if it may pass."""
        given = dict(reversed(scope["headers"]))  # the first of several
        origin = given.get(b"origin")
        own = None if origin is None else b"%s://%s" % (scope.get("scheme", "http").encode(), given.get(b"host", b""))
        named = origin is not None and origin.decode("latin-1") in self._cors
        # an image or a link of a page sends no origin, and some routes change things on a GET
        if not named and (origin not in (None, own) or given.get(b"sec-fetch-site") not in OWN_SITES):
            return _refusing(
                403, "AccessRefused", "a page of another origin may not call this server.",
                "`atropos serve --cors ORIGIN` admits your own page; or type the address into the browser.",
            )  # fmt: skip
        preflight = named and scope["method"] == "OPTIONS" and given.get(b"access-control-request-method")
        if not (preflight or scope["path"] == OPEN):
            return self._not_admitted(scope, given)
        if not _has_body(scope):
            return None
        return _refusing(
            413, "TooLarge", f"{scope['path'][:100]} takes no body.", "Send it without one.",
            [(b"connection", b"close")],  # nothing is read from a client without a token
        )  # fmt: skip

    def _not_admitted(
        self, scope: Scope, given: Mapping[bytes, bytes]
    ) -> Callable[[Scope, Send], Awaitable[None]] | None:
        if self._token is not None:
            if hmac.compare_digest(credential(given.get(b"authorization", b"")), self._token):
                return None
            return partial(
                answer, status=401,
                value={"error": {"kind": "AccessRefused", "message": "this server needs a token, and the given one is wrong."
                           if given.get(b"authorization") else "this server needs a token.",
                           "remedy": "Give `--token-file FILE`, or send `Authorization: Bearer TOKEN`; old clients: http://any:TOKEN@host:port."}},
                headers=[(b"www-authenticate", b'Bearer realm="atropos"')],
            )  # fmt: skip
        connection: Connection | None = scope.get(SCOPE_KEY)
        if connection is not None and not connection.may_call:
            return _other_user
        host = (given.get(b"host") or b"localhost").decode("latin-1")
        if names_this_machine(host):
            return None
        return _refusing(
            403, "AccessRefused", f"this server is only for this machine, but was called as {host[:100]!r}.",
            "Use http://127.0.0.1:PORT, or start it at an address for others, with --token-file.",
        )  # fmt: skip


def _refusing(
    status: int, kind: str, message: str, remedy: str, headers: Headers = ()
) -> Callable[[Scope, Send], Awaitable[None]]:
    return partial(plain_error, status=status, kind=kind, message=message, remedy=remedy, headers=headers)


async def _other_user(scope: Scope, send: Send) -> None:
    connection: Connection = scope[SCOPE_KEY]
    connection.gate.count("user")
    await plain_error(
        scope, send, 403, "AccessRefused", "another user of this machine runs this server, which has no token.",
        "Its user may start it with --token-file, and give you the token.", [(b"connection", b"close")],
    )  # fmt: skip


def _has_body(scope: Scope) -> bool:
    return header(scope, b"transfer-encoding") is not None or header(scope, b"content-length") not in (None, b"0")


def credential(authorization: bytes) -> bytes:
    """The token in a header, as Bearer or as the password of Basic; empty if there is none."""
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
