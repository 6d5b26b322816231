"""Sessions of an OpenEnv server. Each is a WebSocket, used for one episode after another."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from atropos_core import console
from atropos_core.errors import ConfigError, DeadlineExceeded, RemoteError, WorkerLost
from atropos_core.guards.deadlines import within
from atropos_env_openenv.config import OpenenvOptions

LARGEST_BYTES = 64 << 20  # of an answer
END_DEADLINE_S = 2.0  # for the server to end a session after our goodbye
FULL = "CAPACITY_REACHED"  # the server's own codes
RAISED = "EXECUTION_ERROR"  # the environment raised
OF_ACTIONS = ("VALIDATION_ERROR", RAISED)  # the first: the server cannot read an action


class Refused(RemoteError):
    """The server answered with an error, which has a code."""

    def __init__(self, url: str, said: dict[str, Any]) -> None:
        self.code = str(said.get("code", ""))
        self.said = said
        details = "; ".join(f"{one.get('loc')}: {one.get('msg')}" for one in said.get("errors") or [])
        super().__init__(f"the server at {url} refused ({self.code}): {said.get('message', '')} {details}".rstrip())


class Session:
    """A session at the server, reconnected if the connection was lost or a call on it was given up."""

    def __init__(self, options: OpenenvOptions) -> None:
        self._url = options.url
        self._connect_s, self._step_s = options.connect_deadline_s, options.step_deadline_s
        self._connection: ClientConnection | None = None

    async def connect(self) -> None:
        """Connect. Raises WorkerLost if no server answers, Refused if the server has no session left."""
        scheme, _, rest = self._url.partition("://")
        address = f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest}/ws"
        local = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        try:
            self._connection = await connect(
                address,
                open_timeout=self._connect_s,
                max_size=LARGEST_BYTES,
                ping_interval=None,  # calls have deadlines
                proxy=None if local else True,
            )
        except (OSError, WebSocketException) as error:
            raise WorkerLost(f"no OpenEnv server answers at {self._url}: {error or type(error).__name__}") from error
        await self.request("state")  # a server that is full says so in answer to the first message

    async def _connect_again(self) -> None:
        """Connect until the deadline, then raise as `connect`. A full server may not have noticed yet that the previous session
        ended, and a server that ended may be restarted."""
        until = time.monotonic() + self._connect_s
        while True:
            try:
                return await self.connect()
            except (Refused, WorkerLost) as error:
                await self.close()
                may_pass = isinstance(error, WorkerLost) or error.code == FULL
                if not may_pass or time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

    async def request(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer. Raises Refused, WorkerLost, DeadlineExceeded."""
        lost = self._connection is not None and self._connection.close_code is not None
        if self._connection is None or (lost and kind == "reset"):  # a new episode may begin after a lost connection
            await self._connect_again()
        connection, whole = self._connection, False
        assert connection is not None
        try:
            message = {"type": kind} if data is None else {"type": kind, "data": data}
            text = (
                json.dumps(message, ensure_ascii=False).encode(errors="replace").decode()
            )  # half a surrogate pair is not text
            answer = await within(self._exchange(connection, text), self._step_s, f"{self._url}: {kind}")
            whole = True
        except WebSocketException as error:
            raise WorkerLost(f"the server at {self._url} closed the connection: {error}") from error
        finally:
            if not whole:  # a late answer would be taken for the answer to the next request
                await self.close()
        said: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise Refused(self._url, said)
        return said

    async def _exchange(self, connection: ClientConnection, text: str) -> dict[str, Any]:
        with suppress(ConnectionClosed):  # still read what a full server said before it closed
            await connection.send(text)
        answer: dict[str, Any] = json.loads(await connection.recv())
        return answer

    async def end(self) -> None:
        """Ask the server to end the session, and hang up after END_DEADLINE_S."""
        connection = self._connection
        if connection is not None and connection.close_code is None:
            with suppress(ConnectionClosed, TimeoutError):
                async with asyncio.timeout(END_DEADLINE_S):
                    await connection.send('{"type": "close"}')
                    await connection.wait_closed()
        await self.close()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()  # at once: a hanging server does not answer a goodbye, and ends the session anyway
            await connection.wait_closed()


class Sessions:
    """The run's sessions: as many as the server holds, at most `options.sessions`."""

    def __init__(self, options: OpenenvOptions) -> None:
        self._options = options
        self._all: list[Session] = []
        self._free: asyncio.Queue[Session] = asyncio.Queue()
        self._has_told = False

    def tell_once(self, warning: str) -> None:
        if not self._has_told:
            self._has_told = True
            console.warn(warning)

    async def open(self) -> int:
        """Open the sessions and return how many there are. Raises ConfigError if no server answers, or if other clients use all
        of its sessions."""
        full = ""
        while len(self._all) < self._options.sessions and not full:
            session = Session(self._options)
            try:
                await session.connect()
            except Refused as error:
                await session.close()
                if error.code != FULL:
                    raise ConfigError(str(error), remedy="Look at the server's log.") from error
                full = f"{error.said.get('max_sessions', '?')} sessions"
            except (WorkerLost, DeadlineExceeded) as error:
                raise ConfigError(str(error), remedy="Start the server first, and give its URL.") from error
            else:
                self._all.append(session)
                self._free.put_nowait(session)
        if not self._all:
            raise ConfigError(
                f"the server at {self._options.url} holds {full}, and other clients use all of them.",
                remedy="Make the server with a higher max_concurrent_envs, or stop the other clients.",
            )
        if full:
            console.say(f"{self._options.url} holds {full}: {len(self._all)} episodes at once")
        return len(self._all)

    async def take(self) -> Session:
        """Take a free session; no other episode gets it until it is given back."""
        return await self._free.get()

    def give_back(self, session: Session) -> None:
        self._free.put_nowait(session)

    async def close(self) -> None:
        await asyncio.gather(*(session.end() for session in self._all))
        self._all, self._free = [], asyncio.Queue()
