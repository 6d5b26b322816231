"""`uv run` in a checkout that nothing was installed into, as docs/install.md shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tools.install import UV, uv_environment

COMMAND = "uv run atropos run --env gsm8k"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.skipif("DIST" not in os.environ, reason="installs torch: `make test-dist`")
def test_one_line_trains_in_a_fresh_checkout(tmp_path: Path) -> None:
    assert COMMAND in (REPOSITORY / "docs/install.md").read_text()
    checkout = tmp_path / "atropos"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, checkout / name, follow_symlinks=False)
    environment = {**uv_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("VIRTUAL_ENV", None)
    command = [UV, *COMMAND.split()[1:], "--steps", "2", "--set", "evaluation.problems=16"]
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=1100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "held-out accuracy" in ended.stdout
    assert (checkout / ".venv/bin/atropos").is_file()
