"""Episodes for programs that the user starts: `POST /episodes/next` takes one, `POST /episodes/<id>/end` reports its end."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from hmac import compare_digest
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.types import Receive, Scope, Send

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.dialects.fields import Fields, shown
from atropos_agent_api.dialects.values import a_text, an_integer, an_object, wrong
from atropos_agent_api.sandboxes.episode_queue import EpisodeQueue, QueuedEpisode, Report
from atropos_agent_api.server.answering import JSON
from atropos_agent_api.server.requests import key_of, only, read
from atropos_http_server.answers import header, send_whole
from atropos_http_server.connection import HOST, SCOPE_KEY, Connection

EPISODES = "/episodes/"
WAIT_S, MOST_WAIT_S = 20, 60
MOST_FILES = 10_000
MOST_REPORT_BYTES = 1 << 40  # the server's own limit is lower
DEEPEST = 64  # directories inside one another
NEXT = Fields(read={"wait_s": f"seconds to wait for an episode, at most {MOST_WAIT_S}; {WAIT_S} if left out"})
END = Fields(
    read={
        "exit_code": "0 to 255, default 0: anything but 0 is a program that failed",
        "output": 'text, or any JSON value: with answer = "stdout", the text that the reward reads',
        "errors": "text: the program's standard error",
        "files": 'by path in the work directory that rewards see: text, or {"base64": "..."}',
    }
)


class Episodes:
    """Plain ASGI. `token`: the token of programs that may take episodes."""

    def __init__(self, queue: EpisodeQueue, token: bytes) -> None:
        self._queue = queue
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises CallRefused before anything was sent."""
        given = key_of(scope, "it is in the file that the run names when it begins")
        if not compare_digest(given.encode(), self._token):
            raise CallRefused(
                "the token is not this run's. Use the one in the file that the run named when it started.",
                status=401,
                code="invalid_token",
            )
        what = scope["path"].removeprefix(EPISODES)
        id, slash, action = what.partition("/")
        if what == "next":
            only(scope, "POST")
            await self._next(scope, receive, send)
        elif slash and action == "end":
            only(scope, "POST")
            await self._end(id, scope, receive, send)
        else:
            raise CallRefused(
                f"no call has the address {scope['path'][:100]!r}. Use {EPISODES}next and {EPISODES}<id>/end.",
                status=404,
                code="unknown_url",
            )

    async def _next(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = await read(scope, receive, _wait_of, may_be_empty=True)
        connection: Connection | None = scope.get(SCOPE_KEY)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            queued = None
            if not self._queue.is_closed:
                queued = await self._queue.next(WAIT_S if wait_s is None else wait_s, gone)
        finally:
            gone.cancel()
        if queued is not None and connection is not None and connection.has_hung_up():
            self._queue.give_back(queued)
        elif queued is not None:
            await send_whole(send, 200, orjson.dumps(_at(queued, header(scope, b"host") or b"")), [JSON])
        elif self._queue.is_closed:
            raise CallRefused(
                "the run has ended: there are no more episodes. End this program, or start another run.",
                status=410,
                code="run_ended",
            )
        else:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def _end(self, id: str, scope: Scope, receive: Receive, send: Send) -> None:
        queued = self._queue.taken(id)
        report = await read(scope, receive, report_of, may_be_empty=True, most_bytes=MOST_REPORT_BYTES)
        self._queue.taken(id)  # it may have ended in the meantime
        limit = self._queue.reported(queued, report)
        await send_whole(send, 200, orjson.dumps({"id": id, "limit": limit}), [JSON])


def _wait_of(given: Mapping[str, Any]) -> int | None:
    NEXT.check(given)
    return an_integer(given, "wait_s", 0, MOST_WAIT_S)


def report_of(given: Mapping[str, Any]) -> Report:
    """Read a report. Raises CallRefused if it is not one."""
    END.check(given)
    output, errors, files = given.get("output"), given.get("errors"), given.get("files")
    return Report(
        exit_code=an_integer(given, "exit_code", 0, 255) or 0,
        output=b"" if output is None else _output(output),
        errors=b"" if errors is None else a_text(errors, "errors").encode(),
        files={} if files is None else _files(an_object(files, "files")),
    )


def _output(value: Any) -> bytes:
    try:
        return value.encode() if isinstance(value, str) else orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise wrong("output", f"a value that can be written as JSON: {error}") from None


def _files(given: Mapping[str, Any]) -> dict[PurePosixPath, bytes]:
    if len(given) > MOST_FILES:
        raise wrong("files", f"of at most {MOST_FILES:,} files")
    found = {_path(name): _content(value, f"files.{name}") for name, value in given.items()}
    if len(found) < len(given) or any(folder in found for path in found for folder in path.parents):
        raise wrong("files", "of different paths, none of them a folder of another")
    return found


def _path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    fits = len(path.parts) <= DEEPEST and all(len(part.encode()) <= 255 for part in path.parts)
    if (
        path.is_absolute()
        or ".." in path.parts
        or not path.parts
        or "\0" in name
        or not fits
        or len(name.encode()) > 2048
    ):
        raise CallRefused(
            f"the file {shown(name)} is not in the work directory: give a relative path.",
            field="files",
            code="invalid_path",
        )
    return path


def _content(value: Any, where: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, dict) or value.keys() != {"base64"} or not isinstance(value["base64"], str):
        raise wrong(shown(where), 'text, or {"base64": "..."}')
    try:
        return base64.b64decode(value["base64"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong(shown(where), f"base64: {error}") from None


def _at(queued: QueuedEpisode, host: bytes) -> dict[str, Any]:
    """The JSON for the program. Addresses in it are those by which the program reached us, also through a proxy."""
    episode = {"id": queued.id, **queued.content}
    if HOST.fullmatch(host):
        there = urlsplit(queued.url)._replace(netloc=host.decode()).geturl()
        named = queued.content["environment"].items()
        episode["environment"] = {name: text.replace(queued.url, there) for name, text in named}
    return episode


async def _gone(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
