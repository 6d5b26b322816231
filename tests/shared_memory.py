"""What was left behind in /dev/shm, whatever else runs on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

SHM = Path("/dev/shm")


def orphans() -> set[str]:
    """The files there that no living process has mapped or open: nobody will remove them any more."""
    names = {path.name for path in SHM.iterdir()}
    held: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            held |= _held(process)
    return names - held


def _held(process: Path) -> set[str]:
    try:
        links = [os.readlink(link) for link in (process / "fd").iterdir()]
        text = (process / "maps").read_text() + "\n".join(links)
    except OSError:
        return set()  # it has ended, or is somebody else's
    return set(re.findall(r"/dev/shm/([^\s/]+)", text))
