"""The commands as functions: in scripts, inside an event loop, and in the cells of a real notebook's kernel."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from tests.conftest import metrics_of

DEFINED = """
import atropos_core as atropos

class Sevens(atropos.Environment):
    def tasks(self, split):
        return [atropos.Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 {split} {n}"},), answer="7") for n in range(8)]

    async def score(self, task, reply):
        return atropos.Score(reply["content"].count("7") / 8, correct="7" in reply["content"])

async def brief(task, episodes):
    return [-float(len(episode.messages[-1]["content"])) for episode in episodes]

few = {"training": {"groups_per_step": 2, "group_size": 4}, "evaluation.problems": 2}
"""


def script(folder: Path, text: str, *, code: int = 0) -> str:
    (folder / "script.py").write_text(DEFINED + text)
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
    )  # fmt: skip
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_import_is_light(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", "import atropos_core, sys; print(sorted({n.partition('.')[0] for n in sys.modules}))"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert not {"torch", "pydantic", "typer", "numpy", "pandas", "rich", "IPython"} & set(eval(out))


def test_a_run_from_python_is_the_run_of_the_command(atropos: Callable[..., Any], tmp_path: Path) -> None:
    script(
        tmp_path,
        "result = atropos.run(environment=Sevens, model='toy', steps=4, seed=5, set=few, directory='called', deterministic=True)\n"
        "assert result.exit_reason == 'finished' and result.steps == 4 and result.directory.is_absolute()\n"
        "assert result.before['eval/problems'] == result.after['eval/problems'] == 2\n"
        "assert result.metrics['step'].tolist() == [0, 1, 2, 3, 4] and result.metrics['reward/mean'].shape == (5,)\n"
        "frame = result.frame()\n"
        "means = result.metrics['reward/mean']\n"
        "assert frame.index.tolist() == [0, 1, 2, 3, 4] and (frame['reward/mean'].values[1:] == means[1:]).all()\n"
        "assert frame['reward/mean'].isna().tolist() == [True, False, False, False, False], 'step 0 is the evaluation'\n"
        "assert result.policy.is_dir() and result.summary.steps == 4\n",
    )
    (tmp_path / "sevens.py").write_text(DEFINED)
    few = ("training.groups_per_step=2", "training.group_size=4", "evaluation.problems=2")
    ended = atropos(
        "run", "--env", "./sevens.py:Sevens", "--model", "toy", "--steps", "4", "--seed", "5", "--deterministic", "--dir",
        "typed", *(part for change in few for part in ("--set", change)),
    )  # fmt: skip
    assert ended.code == 0, ended.err
    named, called = [tomllib.loads((tmp_path / run / "config.toml").read_text()) for run in ("typed", "called")]
    assert named.pop("environment").keys() == called.pop("environment").keys() == {"sevens"}
    assert named == called
    for one, other in zip(metrics_of(tmp_path / "typed"), metrics_of(tmp_path / "called"), strict=True):
        assert [one.get(key) for key in ("reward/mean", "loss")] == [other.get(key) for key in ("reward/mean", "loss")]


def test_an_object_that_a_resume_is_not_given_again_is_missed_by_name(
    atropos: Callable[..., Any], tmp_path: Path
) -> None:
    out = script(
        tmp_path,
        "from atropos_core.errors import UnknownComponent\n"
        "given = dict(environment=Sevens, reward=['environment', {'use': brief, 'weight': 0.1}])\n"
        "result = atropos.run(**given, model='toy', steps=2, set=few, directory='run')\n"
        "try:\n    atropos.resume(result, steps=3)\nexcept UnknownComponent as error:\n    print('said', error)\n"
        "again = atropos.resume('run', steps=3, **given)\n"
        "assert again.steps == 3 and again.metrics['reward/brief'][-1] < 0\n"
        "assert atropos.resume(again, steps=3, **given).exit_reason == 'finished'\n"
        "evaluation = atropos.evaluate(environment=Sevens(), model='toy', problems=3)\n"
        "assert evaluation.metrics['eval/problems'] == 3 and 'eval/accuracy' in evaluation.intervals\n"
        "made = atropos.process('groups.jsonl', environment=Sevens, reward=brief, model='toy', groups=2, group_size=2)\n"
        "assert len(made.read_text().splitlines()) == 2\n",
    )
    assert "said the environment 'Sevens' was given from Python" in out
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["reward"]["brief"]["weight"] == 0.1
    ended = atropos("resume", "run", "--steps", "4")
    assert ended.code == 2
    assert "environment 'Sevens' was given from Python" in ended.err
    assert "atropos_core.resume(RUN, environment=Sevens)" in ended.err


def test_a_class_of_a_module_is_found_from_every_directory(atropos: Callable[..., Any], tmp_path: Path) -> None:
    """A file next to the script, a package with `__init__.py`, and one without."""
    (tmp_path / "own.py").write_text(DEFINED)
    for folder, beginning in (("regular", "from .grid import SIDE\n"), ("spaced", "from spaced.grid import SIDE\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "grid.py").write_text("SIDE = 3\n")
        (tmp_path / folder / "maze.py").write_text(DEFINED.replace("Sevens", folder.capitalize()) + beginning)
    (tmp_path / "regular/__init__.py").touch()
    script(
        tmp_path,
        "import own, regular.maze, spaced.maze\n"
        "atropos.run(environment=[own.Sevens, regular.maze.Regular, spaced.maze.Spaced], "
        "reward={'use': own.brief, 'runs_in': 'process'}, model='toy', steps=1, set=few, directory='run')\n",
    )
    recorded = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert {one["use"] for one in recorded["environment"].values()} == {
        f"{tmp_path}/own.py:Sevens", f"{tmp_path}/regular/maze.py:Regular", f"{tmp_path}/spaced/maze.py:Spaced"
    }  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text("raise RuntimeError('the wrong file')\n")
    ended = atropos("resume", "../run", "--steps", "2", cwd=elsewhere)
    assert ended.code == 0 and "changed: training.steps" in ended.out and "code" not in ended.out, ended.out + ended.err
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


def test_what_cannot_be_is_an_error_with_a_name_and_no_exit(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import pytest
from atropos_core.errors import ConfigError, FitError, UnknownComponent

for said, error, given in (
    ("Did you mean 'steps'", ConfigError, dict(environment=Sevens, set={"training.stepz": 5})),
    ("Did you mean 'gsm8k'", UnknownComponent, dict(environment="gsm8")),
    ("lacks tasks", ConfigError, dict(environment=type("Empty", (atropos.Environment,), {}))),
    ("not a class derived from .*Sink", ConfigError, dict(environment=Sevens, sink=Sevens)),
    ("no environment to train on", ConfigError, dict()),
    ("training.steps was given a class", ConfigError, dict(environment=Sevens, set={"training.steps": int})),
    ("'brief' was given as an object of this process", ConfigError,
     dict(environment=Sevens, reward={"use": brief, "runs_in": "process"})),
    ("without `use`", ConfigError, dict(environment=[{"weight": 2}])),
):
    with pytest.raises(error, match=said):
        atropos.run(model="toy", **given)

import sys
result = atropos.run(environment=Sevens, model="toy", steps=0, set=few)
sys.modules["pandas"] = None
with pytest.raises(FitError, match="pandas, which is not installed"):
    result.frame()
assert not atropos.check(brief, kind="reward").broken
assert [finding.subject for finding in atropos.check(type("B", (), {"__call__": lambda s, t, e: 1 / 0}), kind="reward").broken]
assert "jsonl" in atropos.installed().names("sink") and not atropos.installed().broken
assert atropos.doctor(result).kind == "run"
""",
    )


def test_a_call_inside_an_event_loop_blocks_until_the_run_has_ended(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
import asyncio

async def main():
    result = atropos.run(environment=Sevens, model="toy", steps=2, set=few)
    assert result.steps == 2
    assert atropos.evaluate(environment=Sevens, model="toy", problems=2).metrics["eval/problems"] == 2
    assert atropos.evaluate(environment=Sevens, model="toy", problems=2, reward=brief).metrics["eval/reward"] <= 0
    assert not atropos.check(brief, kind="reward").broken
    try:
        atropos.run(environment="nothing", model="toy")
    except atropos.errors.UnknownComponent as error:
        return str(error)

import atropos_core.errors
assert "no environment named 'nothing'" in asyncio.run(main())
""",
    )


def test_ctrl_c_in_a_script_pauses_the_run_and_the_call_returns(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        DEFINED + "result = atropos.run(environment=Sevens, model='toy', steps=100000, set=few, directory='run')\n"
        "assert result.exit_reason == 'paused' and result.summary is None and result.steps > 0 and result.before\n"
        "print('returned', atropos.resume(result, environment=Sevens, steps=result.steps + 1).exit_reason)\n"
    )
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "run")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "returned finished" in out, out
    assert "Go on with: atropos_core.resume(" in out


def wait_for_steps(run: Path, steps: int = 3) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        # whole lines: the run is writing the next one
        if (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_text().count("\n") > steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run} took no {steps} steps within a minute")


# -- in a notebook


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real kernel in an empty folder, and its client."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = KernelManager()
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_interrupting_a_cell_pauses_the_run_and_the_next_cell_goes_on(kernel: Any, tmp_path: Path) -> None:
    manager, client = kernel
    said: list[str] = []

    def hear(message: Any) -> None:
        content = message["content"]
        said.append(json.dumps(content.get("data") or content.get("text") or content.get("ename", "")))

    def cell(text: str) -> str:
        said.clear()
        client.execute_interactive(text, timeout=60, output_hook=hear)
        return "\n".join(said)

    cell(DEFINED)
    before = client.execute(
        "result = atropos.run(environment=Sevens, model='toy', steps=100000, set=few, directory='run')"
    )
    wait_for_steps(tmp_path / "run")
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=60)
    while reply["parent_header"].get("msg_id") != before:
        reply = client.get_shell_msg(timeout=60)
    assert reply["content"]["status"] == "ok", reply["content"]
    assert "paused" in cell("result.exit_reason")
    assert "finished" in cell("atropos.resume(result, environment=Sevens, steps=result.steps + 2).exit_reason")


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
import atropos_core.launch.start as start
from atropos_core.builtin.local import LocalBridge
from atropos_core.errors import DeadlineExceeded

class Stuck(LocalBridge):
    transports = {"in_process"}

    async def connect(self, trainer, engines):
        await asyncio.sleep(1e9)

start.MODEL_DEADLINE_S = 0.5
with pytest.raises(DeadlineExceeded, match="bridge .*connect"):
    atropos.run(environment=Sevens, model="toy", bridge=Stuck, steps=1, set=few)
""",
    )
