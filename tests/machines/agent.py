"""What starts processes on a machine for others, as an ssh daemon would: `python -m tests.machines.agent SOCKET`. It is reached over a Unix
socket in the file system that machines share, so that nothing of it goes over their network.

A connection is one process: a line of JSON with its command and variables comes with a descriptor that it prints to; the answer is its pid,
and later a line for how it ended. Lines that come after are signals. It is killed, with what it started, when the connection is closed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress


def serve(connection: socket.socket) -> None:
    line, [output, *_], _, _ = socket.recv_fds(connection, 1 << 16, 1)
    lines = connection.makefile("rwb")
    wanted = json.loads(line if line.endswith(b"\n") else line + lines.readline())
    process = subprocess.Popen(
        wanted["command"],
        env=wanted["environment"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    os.close(output)
    lines.write(f"{process.pid}\n".encode())
    lines.flush()
    threading.Thread(target=_tell, args=(process, connection)).start()
    for number in lines:
        _send(process.pid, int(number))
    _send(process.pid, signal.SIGKILL)


def _tell(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    code = process.wait()
    _send(process.pid, signal.SIGKILL)  # what it started
    with suppress(OSError):
        connection.sendall(json.dumps({"code": code}).encode() + b"\n")


def _send(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def main() -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(sys.argv[1])
    listening.listen()
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
