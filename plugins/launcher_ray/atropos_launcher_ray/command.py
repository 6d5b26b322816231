"""Run a command of `atropos` as a process of a run: `python -m atropos_launcher_ray.command HOST:PORT ROLE`, with the command in the
environment. It ends when the connection to the run closes, or with the actor that holds it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from atropos_core import console
from atropos_core.cli import main as atropos
from atropos_core.processes.child_main import end_with_parent
from atropos_core.processes.dialing import dial

COMMAND = "ATROPOS_LAUNCHER_RAY_COMMAND"
HOST = "{host}"  # an argument: the address of the machine that it runs on
FINISH = b"."  # on the connection: finish the current work, then end
TWICE_S = 0.6  # a second signal this much later ends a worker at once
END_S = 5.0


def variables(arguments: Sequence[str]) -> Mapping[str, str]:
    """Variables for such a process. Relative paths in them resolve as in this directory."""
    paths = [os.path.abspath(entry) for entry in sys.path]
    return {COMMAND: json.dumps([list(arguments), paths, os.getcwd()]), "PYTHONUNBUFFERED": "1"}


def main() -> None:
    end_with_parent()
    connection = dial(sys.argv[1])
    arguments, paths, directory = json.loads(os.environ.pop(COMMAND))
    sys.path.extend(entry for entry in paths if entry not in sys.path)
    try:
        os.chdir(directory)
    except OSError as error:
        console.warn(
            f"{directory}, the directory in which the run was started, is not on {socket.gethostname()}: {error.strerror}."
        )
    threading.Thread(target=_end_on_request, args=(connection,), daemon=True).start()
    sys.argv = ["atropos", *(connection.getsockname()[0] if argument == HOST else argument for argument in arguments)]
    atropos()


def _end_on_request(connection: socket.socket) -> None:
    finish = True
    while finish:
        try:
            finish = connection.recv(1) == FINISH
        except OSError:
            finish = False
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TWICE_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main()
