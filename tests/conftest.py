"""What the tests share: the command line as a user has it, and environments to run it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def atropos(tmp_path: Path) -> Callable[..., Ended]:
    """Run `atropos ARGUMENTS` in an empty folder, as a process of its own."""

    def run(*arguments: str, timeout: float = 120, cwd: Path = tmp_path, **environment: str) -> Ended:
        ended = subprocess.run(
            [sys.executable, "-m", "atropos_core", *arguments],
            cwd=cwd,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


TOY = """
from pathlib import Path
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task


class Sevens(Environment):
    \"\"\"The more sevens, the better.\"\"\"

    def tasks(self, split):
        numbers = range(16) if split == "train" else range(16, 20)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},), answer="7") for n in numbers]

    async def score(self, task, reply):
        text = reply["content"]
        return Score(text.count("7") / 8, correct=text.startswith("7"))
"""


@pytest.fixture
def sevens(tmp_path: Path) -> str:
    """A reference to an environment that the toy policy learns in a second."""
    (tmp_path / "sevens.py").write_text(TOY)
    return "./sevens.py:Sevens"


def in_front(*folders: Path | str) -> str:
    """PYTHONPATH with these folders before what it has. (An empty part of it would be the current directory.)"""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plant(folder: Path, name: str, source: str, *, distribution: str | None = None) -> None:
    """An installed plugin: a module and the metadata of a distribution, on PYTHONPATH."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{distribution or name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution or name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[atropos]\n{name} = {name}\n")
