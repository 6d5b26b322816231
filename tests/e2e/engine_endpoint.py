"""The endpoint of an engine as a process of its own: `python -m tests.e2e.engine_endpoint --host HOST --port PORT`."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.plugins.provider import RunContext
from atropos_trajectory_api.engine_http.server import GRACE_S, open_engine_server


async def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--host", required=True)
    given.add_argument("--port", required=True)
    given.add_argument("--grace-s", type=int, default=GRACE_S)
    where = given.parse_args()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = ToyEngine(ToyEngineOptions(), RunContext(Path("run"), TOY_MODEL))
    endpoint = await open_engine_server(
        engine, f"{where.host}:{where.port}", None, await engine.open(), grace_s=where.grace_s
    )
    await stop.wait()
    await endpoint.close()


if __name__ == "__main__":
    asyncio.run(main())
