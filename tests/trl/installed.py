"""The installed TRL: the one that the Python in TRL_PYTHON has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

WHERE = "import importlib.util; print(*importlib.util.find_spec('trl').submodule_search_locations)"


def folder() -> Path | None:
    """The folder of the package, or None where TRL_PYTHON is not set. Nothing of it is imported."""
    if "TRL_PYTHON" not in os.environ:
        return None
    ended = subprocess.run(
        [os.environ["TRL_PYTHON"], "-c", WHERE], capture_output=True, text=True, timeout=60, check=True
    )
    return Path(ended.stdout.strip())
