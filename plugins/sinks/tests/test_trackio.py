"""Trackio for real: its own database, read back by its interface and by its command."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_sinks.config import TrackioOptions
from atropos_sinks.trackio_sink import TrackioSink
from tests import sinks
from tests.conftest import TOY, metrics_of
from tests.disks import mounted
from tests.e2e.runs import RunningRun, finish


@pytest.fixture
def folder(tmp_path):
    (run := tmp_path / "my-run").mkdir()
    return run


async def recorded(folder, steps, state=None, **options):
    return await sinks.recorded(TrackioSink(TrackioOptions(**options), folder), steps, state)


def runs(project="atropos"):
    import trackio

    return list(trackio.Api().runs(project))


def history(run_id, project="atropos"):
    """[(step, metrics)] in the order of steps, with all that is there twice."""
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run_id=run_id)
    own = ("step", "timestamp")
    return sorted(
        ((row["step"], {name: value for name, value in row.items() if name not in own}) for row in rows),
        key=lambda row: row[0],
    )


async def test_a_run_has_its_metrics_and_settings(projects, folder):
    (folder / "config.toml").write_text("seed = 7\n[trainer]\nlearning_rate = 0.5\napi_key = 'hunter2'\n")
    steps = {
        0: {"eval/accuracy": 0.25},
        1: {"loss": 1 / 3, "time": 2.0, "__x": 3.0},
        2: {"loss": 1e-7, "big": math.inf},
    }
    state = await recorded(folder, steps, project="maths", name="first-try", group="sweep")
    [run] = runs("maths")
    assert (run.id, run.name) == (state["id"], "first-try")
    assert (run.config["seed"], run.config["trainer"], run.config["_Group"]) == (7, {"learning_rate": 0.5}, "sweep")
    assert history(run.id, "maths") == [
        (0, {"eval/accuracy": 0.25}),
        (1, {"loss": 1 / 3, "__time": 2.0, "____x": 3.0}),  # as trackio.log renames what is its own
        (2, {"loss": 1e-7, "big": math.inf}),
    ]
    assert not any(b"hunter2" in path.read_bytes() for path in projects.rglob("*") if path.is_file())


async def test_after_a_resume_each_step_is_there_once_with_the_values_that_count(projects, folder):
    state = await recorded(folder, {0: {"a": 0.0}, 1: {"a": 1.0}}, config=False)
    [before] = [run.config for run in runs()]
    await recorded(folder, {2: {"a": 2.0}, 3: {"a": 3.0}}, state, config=False)  # the run that died
    other = await recorded(folder, {0: {"a": 9.0}, 5: {"a": 9.0}})
    (folder / "config.toml").write_text("seed = 8\n")
    again = await recorded(folder, {2: {"a": -2.0}, 3: {"a": -3.0}}, state)
    assert again == {"id": state["id"], "step": 3}
    assert history(again["id"]) == [(0, {"a": 0.0}), (1, {"a": 1.0}), (2, {"a": -2.0}), (3, {"a": -3.0})]
    assert [step for step, _ in history(other["id"])] == [0, 5], "another run of that name keeps what it has"
    config = next(run.config for run in runs() if run.id == again["id"])
    assert (config["seed"], config["_Created"]) == (8, before["_Created"])
    assert "seed" not in before


def command(*arguments):
    ended = subprocess.run(
        [sys.executable, "-m", "trackio.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(ended.stdout[ended.stdout.index("{") :])


def test_what_a_killed_run_logged_is_there_and_a_resume_goes_on(projects, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "sevens.py").write_text(TOY)
    run = RunningRun(
        folder, "run", "--model", "toy", "--env", f"{tmp_path}/sevens.py:Sevens", "--dir", str(folder), "--steps", "400",
        "--set", "sink.trackio.project=maths", "--set", "sink.jsonl.use=jsonl", "--set", "checkpoint.every=5",
    )  # fmt: skip
    try:
        run.wait_for_step(12)
        run.kill("supervisor")
        run.process.wait(60)
        logged = {line["step"] for line in metrics_of(folder)}
        values = command("get", "metric", "--project", "maths", "--run", "run", "--metric", "reward/mean")["values"]
        assert {value["step"] for value in values} >= logged - {0}
    finally:
        run.process.kill()
    finish(folder, "resume", str(folder), "--set", "training.steps=20")
    lines = {line["step"]: line["reward/mean"] for line in metrics_of(folder) if "reward/mean" in line}
    values = command("get", "metric", "--project", "maths", "--run", "run", "--metric", "reward/mean")["values"]
    assert {value["step"]: value["value"] for value in values} == lines
    assert len(values) == len(lines)


async def test_a_directory_that_cannot_be_written_is_named_before_the_first_step(projects, folder):
    projects.write_text("in the way")
    with pytest.raises(
        RunDirectoryError, match=rf"Trackio's {projects}/atropos.db cannot be written(.|\n)*TRACKIO_DIR"
    ):
        await recorded(folder, {0: {"a": 0.0}})


async def test_a_file_system_that_turns_read_only_or_is_full_is_named_at_the_step(projects, folder):
    with mounted(projects, "2m") as where:
        sink = await sinks.opened(TrackioSink(TrackioOptions(), folder))
        await sink.step(0, {"a": 0.0}, [])
        subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        with pytest.raises(RunDirectoryError, match=r"cannot be written: .*[Rr]ead-?only"):
            await sink.step(1, {"a": 0.0}, [])
        subprocess.run(["mount", "-o", "remount,rw", where], check=True)
        with pytest.raises(RunDirectoryError, match=r"cannot be written: .*full"):
            for step in range(1, 100):
                await sink.step(step, {f"a long name/{step}/{name}": float(name) for name in range(5000)}, [])
        assert history(sink.state()["id"])[-1][0] == sink.state()["step"]
        await sink.close()


async def test_a_database_that_another_process_holds_is_waited_for_and_then_named(projects, folder):
    import fcntl

    sink = await sinks.opened(TrackioSink(TrackioOptions(), folder))
    with (projects / "atropos.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="cannot be written: Could not acquire database lock"):
            await sink.step(0, {"a": 0.0}, [])
    await sink.step(0, {"a": 0.0}, [])
    assert len(history(sink.state()["id"])) == 1


async def test_a_project_that_trackio_cannot_have_and_a_directory_on_a_network_are_refused(
    projects, folder, monkeypatch
):
    with pytest.raises(ConfigError, match=r"sink.trackio.project: Project name 'registry-x' is not allowed"):
        await recorded(folder, {0: {"a": 0.0}}, project="registry-x")
    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")  # Trackio's own choice on a network
    with pytest.raises(ConfigError, match=r"no database in(.|\n)*TRACKIO_STORAGE_MODE=sqlite"):
        await recorded(folder, {0: {"a": 0.0}})


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which sees every connection, is not installed")
def test_it_reaches_no_network(projects, tmp_path):
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from atropos_sinks.config import TrackioOptions\n"
        "from atropos_sinks.trackio_sink import TrackioSink\n"
        "async def main(folder):\n"
        "    sink = TrackioSink(TrackioOptions(), folder)\n"
        "    await sink.open(); await sink.step(0, {'a': 1.0}, []); await sink.close()\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace)]
    subprocess.run([*strace, sys.executable, "-c", script, str(tmp_path)], check=True, timeout=200)
    assert not re.findall(r"AF_INET6?\b", trace.read_text())
    assert (projects / "atropos.db").is_file()
