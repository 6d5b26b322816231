"""The program in the pod of the run itself: `python -m atropos_launcher_kubernetes.loop RUN_FILE RUN_DIRECTORY`. It is `atropos resume`,
which begins or continues a run. It also notes the end, so that the other pods end."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from atropos_core.storage.atomic import write_whole
from atropos_core.storage.file_permissions import make_private, private_files
from atropos_launcher_kubernetes.config import ENDED, POD_ADDRESS, SECRETS

SAVED = 130


def run(command: Sequence[str]) -> int:
    """Run it, and return its exit code; signals that ask this process to end are passed on."""
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--server-port", type=int)
    given = parser.parse_args()
    directory: Path = given.directory
    with private_files():
        make_private(directory)
        (directory / ENDED).unlink(missing_ok=True)
        if not (directory / "config.toml").exists():
            write_whole(directory / "config.toml", given.run_file.read_text())
    server: list[str] = []
    if given.server_port is not None:
        at = {
            "api.url": f"http://127.0.0.1:{given.server_port}",
            "api.token_file": f"{os.environ[SECRETS]}/token",
            "api.engine_address": f"{os.environ[POD_ADDRESS]}:0",
        }
        server = [part for path, value in at.items() for part in ("--set", f"{path}={value}")]
    code = run([sys.executable, "-m", "atropos_core", "resume", str(directory), *server])
    if code < SAVED:  # otherwise it was told to end, or killed, and continues in the next pod
        write_whole(directory / ENDED, f"{code} {uuid.uuid4()}")
    sys.exit(code)


if __name__ == "__main__":
    main()
