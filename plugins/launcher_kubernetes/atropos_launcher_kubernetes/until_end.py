"""A command that ends with the run: `python -m atropos_launcher_kubernetes.until_end RUN_DIRECTORY COMMAND ...`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from atropos_launcher_kubernetes.holder import ended

LOOK_S = 1.0
END_S = 30.0


def main() -> None:
    directory, command = Path(sys.argv[1]), sys.argv[2:]
    before = ended(directory)
    process = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(number))
    while process.poll() is None:
        if ended(directory) not in ("", before):
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            sys.exit(0)
        time.sleep(LOOK_S)
    sys.exit(128 - process.returncode if process.returncode < 0 else process.returncode)


if __name__ == "__main__":
    main()
