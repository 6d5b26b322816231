"""Wheels of our own packages, built here without asking anybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def build(out: Path, *projects: Path) -> list[Path]:
    """What lies in `out` once these are built."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", out]
    subprocess.run([*command, *projects], check=True, timeout=180)
    return sorted(out.glob("*.whl"))
