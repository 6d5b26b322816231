"""What starts processes on a machine for others, as an ssh daemon would: `python -m tests.machines.agent SOCKET`. It is reached over a Unix
socket in the file system that machines share, so that nothing of it goes over their network.

A connection is one process: a line of JSON with its command, variables and log; then the answer, its pid; later a line for how it ended.
It is killed, with what it started, when the connection is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress

ENDED_LINE = '{"code": %d}\n'


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    wanted = json.loads(await reader.readline())
    with open(wanted["log"], "ab") as log:  # noqa: ASYNC230 - one process at a time is quick enough
        process = await asyncio.create_subprocess_exec(
            *wanted["command"],
            env=wanted["environment"],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    writer.write(f"{process.pid}\n".encode())
    ending = asyncio.ensure_future(process.wait())
    while not ending.done():
        reading = asyncio.ensure_future(reader.readline())
        await asyncio.wait({ending, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            break
        line = reading.result().decode()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, int(line) if line else signal.SIGKILL)
        if not line:
            break
    with suppress(ProcessLookupError):  # what it started
        os.killpg(process.pid, signal.SIGKILL)
    writer.write((ENDED_LINE % await ending).encode())
    with suppress(ConnectionError):
        await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_unix_server(serve, sys.argv[1])
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
