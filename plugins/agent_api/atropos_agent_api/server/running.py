"""The server of the API: opened inside the running loop, closed with the run."""

from __future__ import annotations

from atropos_agent_api.server.app import KEEP_ALIVE_S, AgentApi, refuse_early
from atropos_agent_api.server.episodes import Episodes
from atropos_agent_api.sessions.sessions import Sessions
from atropos_http_server.answers import Refusals
from atropos_http_server.body_limits import Limits
from atropos_http_server.connection_limits import Gate
from atropos_http_server.server import ListenOptions, RunningServer, serve_in_loop

MODEL = "policy"  # the model name that programs get; any name works
BODY_BYTES = 32_000_000
IN_FLIGHT_BYTES = 512_000_000  # of all bodies that are being read, with JSON counted at eight times its bytes
REQUEST_S = 60.0  # for a request to arrive, and for the client to read some of an answer
CONNECTIONS = 2048
KEPT_ALIVE_S = 600  # a connection between two calls, since an agent may run a tool for long
GRACE_S = 2  # for unfinished answers at the end


async def open_agent_server(
    sessions: Sessions,
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    request_s: float = REQUEST_S,
    connections: int = CONNECTIONS,
    body_bytes: int = BODY_BYTES,
    keep_alive_s: float = KEEP_ALIVE_S,
    episodes: Episodes | None = None,
    grace_s: int = GRACE_S,
) -> RunningServer:
    """Let agents call `sessions` over HTTP: a session is at `url + "/s/" + session.id`. `keep_alive_s`: between two comments of a
    waiting stream; `episodes`: for programs that take them. Raises ConfigError if the address cannot be used."""
    refusals = Refusals(refuse_early)
    app = Limits(
        AgentApi(sessions, model, keep_alive_s=keep_alive_s, episodes=episodes),
        body_bytes=body_bytes,
        in_flight_bytes=max(IN_FLIGHT_BYTES, 8 * body_bytes),
        request_s=request_s,
        hold_s=request_s,
        refusals=refusals,
    )
    gate = Gate(request_s, connections, refusals=refusals)
    return await serve_in_loop(
        app,
        gate,
        host,
        port,
        stop=app.stop,
        grace_s=grace_s,
        keep_alive_s=KEPT_ALIVE_S,
        options=ListenOptions("sandbox.host", "sandbox.port"),
    )
