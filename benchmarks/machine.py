"""On what, and at which commit, a figure was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def described() -> dict[str, Any]:
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/", ":!/benchmarks/results")  # earlier figures are no change
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    return {
        "commit": commit + ("+changes" if changed else ""),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def _version(distribution: str) -> str | None:
    """None where this environment is without it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    """Nothing where there is no git, or no repository."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
