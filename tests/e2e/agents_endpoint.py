"""The endpoint of agents, without a session, as a process of its own:
`python -m tests.e2e.agents_endpoint --grace-s 60 --host HOST --port PORT`."""

from __future__ import annotations

import argparse
import asyncio
import signal

from atropos_agent_api.server.running import open_agent_server
from atropos_agent_api.sessions.sessions import Sessions


async def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--host", required=True)
    given.add_argument("--port", type=int, required=True)
    given.add_argument("--grace-s", type=int, required=True)
    where = given.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    endpoint = await open_agent_server(Sessions(), "policy", host=where.host, port=where.port, grace_s=where.grace_s)
    await stop.wait()
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main())
