"""Prints what a process can see of how it was started: `python -m tests.warm.seen WORDS`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    seen = {
        "parent": os.getppid(),
        "command": [word.lstrip("/") for word in Path("/proc/self/cmdline").read_text().split("\0")],
        "arguments": sys.argv[1:],
        "path": sys.path,
        "directory": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "umask": status["Umask"],
        "blocked": status["SigBlk"],
        "ignored": status["SigIgn"],
        "threads": status["Threads"],
        "descriptors": sorted(
            one for one in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{one}")
        ),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "on SIGINT": str(signal.getsignal(signal.SIGINT)),
        "streams": [
            [each.encoding, each.errors, each.line_buffering, each.write_through, each.fileno()] if each else None
            for each in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "module": [__name__, __file__],
        "imported": getattr(importlib.import_module(os.environ["IMPORT"]), "name", "")
        if "IMPORT" in os.environ
        else None,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
    sys.exit(int(os.environ.get("EXIT", "0")))
