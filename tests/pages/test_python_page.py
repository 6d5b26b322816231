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
    assert ended.stdout.splitlines()[-1].startswith("0.0 [")


def test_a_view_is_served_beside_the_script_until_it_is_closed_and_a_file_is_written_once(tmp_path: Path) -> None:
    out = script(
        tmp_path,
        """
import asyncio, os, signal, urllib.error, urllib.request
from pathlib import Path
import pytest
from atropos_core.errors import AtroposError, RunDirectoryError

result = atropos.run(environment=Sevens, model="toy", steps=1, set=few)

def records(page):
    base, token = page.url.split("/#token=")
    call = urllib.request.Request(base + "/records/runs", headers={"authorization": f"Bearer {token}"})
    return urllib.request.urlopen(call, timeout=10).read().decode()

with atropos.view(result, str(result.directory)) as page:
    assert page.is_open and result.directory.name in records(page)
    assert page.url in page._repr_html_() and page._repr_html_().startswith("<a href=")
    port = int(page.url.split(":")[2].split("/")[0])
    with pytest.raises(AtroposError, match=f"nothing can listen at 127.0.0.1:{port}"):
        atropos.view(result, port=port)
    os.kill(page._process.pid, signal.SIGINT)  # as a Ctrl-C of a terminal, which goes to both
    assert result.directory.name in records(page)
with pytest.raises(urllib.error.URLError):
    records(page)
assert not page.is_open and page._repr_html_() == "closed" and repr(page) == "View(closed)"
page.close()
with pytest.raises(RunDirectoryError, match="is not a run directory"):
    atropos.view("nowhere")
assert atropos.save_view(result, out="a.html") == Path("a.html")
with pytest.raises(RunDirectoryError, match="a.html exists already"):
    atropos.save_view(result, out="a.html")
assert atropos.save_view(result, out="a.html", force=True).read_text().startswith("<!doctype html>")

async def cell():
    return atropos.view(result)

page = asyncio.run(cell())
assert result.directory.name in records(page)
print("server", page._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        code=-signal.SIGKILL,
    )
    server = Path("/proc", re.findall(r"^server (\d+)$", out, re.M)[0])
    end = time.monotonic() + 20
    while server.exists() and "Z" not in (server / "stat").read_text().rpartition(")")[2]:
        assert time.monotonic() < end, "the server outlives the script that was killed"
        time.sleep(0.05)


def test_a_bridge_that_never_connects_is_given_up_by_name(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import asyncio
import pytest
import atropos_core.launch.supervisor as supervisor
from atropos_core.builtin.local import LocalBridge
from atropos_core.errors import DeadlineExceeded

class Stuck(LocalBridge):
    transports = {"in_process"}

    async def connect(self, trainer, engines):
        await asyncio.sleep(1e9)

supervisor.MODEL_DEADLINE_S = 0.5
with pytest.raises(DeadlineExceeded, match="bridge .*connect"):
    atropos.run(environment=Sevens, model="toy", bridge=Stuck, steps=1, set=few)
""",
    )
