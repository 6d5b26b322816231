"""A run directory, with its checkpoints, as an earlier Atropos left it after four of eight steps: the toy policy, no torch.

`python -m tests.pins.run_directory` writes data/run_directory.tar.gz anew, with the code of that day: `run/`, the environment
`sevens.py`, and `whole.npy`, the policy that the same run has after eight steps without a stop.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.conftest import TOY

RECORDED = Path(__file__).parent / "data/run_directory.tar.gz"
RUN = (
    "run", "--model", "toy", "--env", "sevens:Sevens", "--deterministic", "--set", "evaluation.problems=4",
    "--set", "training.groups_per_step=4", "--set", "trainer.learning_rate=20.0", "--set", "checkpoint.every=2",
)  # fmt: skip
POLICY = "checkpoints/step-000008/policy/table.npy"


def atropos(folder: Path, *arguments: str) -> str:
    """What `atropos ARGUMENTS` says in this directory."""
    command = [sys.executable, "-m", "atropos_core", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "sevens.py").write_text(TOY)
        atropos(folder, *RUN, "--steps", "8", "--dir", "whole")
        shutil.copy(folder / "whole" / POLICY, folder / "whole.npy")
        atropos(folder, *RUN, "--steps", "4", "--dir", "run")
        with tarfile.open(RECORDED, "w:gz") as packed:
            for name in ("run", "sevens.py", "whole.npy"):
                packed.add(folder / name, name)
