"""Serve the page on this machine's loopback address, only to callers with this start's token.

The token follows `#` in the address, and browsers never send that part. The page's script reads it and sends it with each call.
So other sites cannot read anything, whatever name they give this address (DNS rebinding), and neither can other users of the
machine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
from importlib.resources import files
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_core import console
from atropos_core.errors import AccessRefused, AtroposError
from atropos_http_server.answers import header, refuse_as_json
from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import ListenOptions, serve_in_loop
from atropos_viewer.page_records import PageRecords

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # names under which a browser may call; any port, since a tunnel has a different one
HEAD_S, CONNECTIONS, GRACE_S, KEEP_ALIVE_S = 20.0, 64, 2, 75
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGE = files("atropos_viewer") / "page"


def serve(records: PageRecords, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError if the port cannot be used."""
    records.get("runs", {})  # read the metrics now, so that the page need not wait for them
    asyncio.run(_serve(records, port))


async def _serve(records: PageRecords, port: int) -> None:
    token = secrets.token_urlsafe(24)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(HEAD_S, CONNECTIONS)
    running = await serve_in_loop(
        application(records, token),
        gate,
        HOST,
        port,
        stop=nobody_waits,
        grace_s=GRACE_S,
        keep_alive_s=KEEP_ALIVE_S,
        options=ListenOptions(port="--port"),
    )
    try:
        names = ", ".join(str(run.directory) for run in records.runs)
        console.say(f"{names}: open this address in a browser on this machine; press Ctrl-C to stop.")
        console.say(f"{running.url}/#token={token}")
        await stop.wait()
    finally:
        await running.close()


def nobody_waits() -> None:
    """Called when the server ends. Does nothing: this server reads no bodies and answers every call at once."""


def application(records: PageRecords, token: str) -> ASGIApp:
    """The ASGI application: page files for callers that use this machine's name, records for those with the token."""

    def record(request: Request) -> Response:  # runs in a thread, because it reads files
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            refused = AccessRefused(
                "this page needs the token of its address.",
                remedy="Open the whole address that `atropos view` printed; each start has a new token.",
            )
            return json_answer(401, _said(refused))
        try:
            return json_answer(200, records.get(request.path_params["address"], request.query_params))
        except AtroposError as error:
            return json_answer(404, _said(error))

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:
            return json_answer(404, {"message": "the page does not have this file.", "remedy": ""})
        return Response(assets[name], media_type=KINDS[name[name.rindex(".") :]])

    async def failed(request: Request, error: Exception) -> Response:
        return json_answer(
            500,
            {
                "message": f"the server failed on this call: {type(error).__name__}.",
                "remedy": "Please report it with the traceback that `atropos view` printed.",
            },
        )

    assets = page_files()
    routes = [Route("/", page), Route("/page/{name:path}", page), Route("/records/{address:path}", record)]
    return _Guard(Starlette(routes=routes, exception_handlers={Exception: failed}))


def page_files() -> dict[str, bytes]:
    """Every file of the page, by its path."""
    found = {one.name: one.read_bytes() for one in PAGE.iterdir() if one.is_file() and _served(one.name)}
    vendored = {f"vendored/{one.name}": one.read_bytes() for one in (PAGE / "vendored").iterdir() if _served(one.name)}
    return found | vendored


def _served(name: str) -> bool:
    return name.endswith(tuple(KINDS))


class _Guard:
    """ASGI middleware: accept only calls to a name of this machine, and add security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # websockets are not served

        async def bound(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        host = (header(scope, b"host") or b"").decode("latin-1")
        if _name(host) not in NAMES:
            error = AccessRefused(
                f"this page is only for this machine, but was called as {host[:100]!r}.",
                remedy=f"Use http://{HOST}:PORT.",
            )
            await refuse_as_json(scope, bound, 403, error)
            return
        await self._app(scope, receive, bound)


def _name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def json_answer(status: int, value: object) -> Response:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def _said(error: AtroposError) -> dict[str, str]:
    return {"message": Exception.__str__(error), "remedy": error.remedy or ""}
