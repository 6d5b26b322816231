"""docs/python.md, its notebook in a real kernel, and the lines of the README that are Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import REPOSITORY, metrics_of
from tests.pages.blocks import BLOCKS, the_block

NOTEBOOK = REPOSITORY / "docs/notebooks/first_run.ipynb"


def test_the_notebook_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "outputs are no part of it"
    (tmp_path / "here").mkdir()
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path / "here")}}).execute()
    shown = {cell.source.splitlines()[-1]: cell.outputs for cell in cells}
    lines = [output.data["text/plain"] for output in shown["result"] if output.output_type == "display_data"]
    assert [line for line in lines if "step 3/3" in line], "one line that changes shows the progress"
    assert len([line for line in lines if " reward " in line]) == 1
    assert "finished" in shown["result"][-1].data["text/plain"]
    assert shown["result.steps"][-1].data["text/plain"] == "4"
    [run] = (tmp_path / "here/runs").iterdir()
    assert metrics_of(run)[-1]["policy/probe_shift_nats"] > 0


def test_the_examples_of_the_page_run_one_after_another(tmp_path: Path) -> None:
    blocks = [block.text for block in BLOCKS if block.page == "docs/python.md" and block.language == "python"]
    (tmp_path / "page.py").write_text("\n".join(blocks))
    ended = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "unknown key 'training.stepz' (from flag). Did you mean 'steps'?" in ended.stdout
    last = metrics_of(sorted((tmp_path / "runs").iterdir())[-1])[-1]
    assert last["step"] == 3 and "reward/longer" in last


def test_the_lines_of_the_readme_run_beside_its_environment(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(the_block("README.md", "import random").text)
    lines = the_block("README.md", "import atropos_core as atropos").text
    few = "model='toy', set={'evaluation.problems': 4, 'training.groups_per_step': 2}, steps=2)"
    assert lines.count("steps=40)") == 1
    (tmp_path / "page.py").write_text(lines.replace("steps=40)", few))
    ended = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "0.0 0.0"
