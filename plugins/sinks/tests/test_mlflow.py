"""MLflow for real: its own client and its own store of files, read back by its client; and a server that is not there."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from atropos_core.errors import ConfigError, DeadlineExceeded
from atropos_sinks.config import MlflowOptions
from atropos_sinks.mlflow_sink import MlflowSink
from tests import sinks

STEPS = 4


def made(folder, **options):
    uri = f"file:{folder.parent}/mlruns"
    return MlflowSink(MlflowOptions(**{"tracking_uri": uri, **options}), folder, STEPS)


@pytest.fixture
def folder(tmp_path):
    (run := tmp_path / "my-run").mkdir()
    return run


def client(folder):
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"file:{folder.parent}/mlruns")


def runs(folder, experiment="atropos"):
    there = client(folder)
    return there.search_runs([there.get_experiment_by_name(experiment).experiment_id])


def history(folder, run_id, name):
    """[(step, value)], sorted, with all that is there twice."""
    return sorted((one.step, one.value) for one in client(folder).get_metric_history(run_id, name))


async def test_a_run_has_its_metrics_parameters_tags_end_and_files(folder):
    (folder / "config.toml").write_text("seed = 7\n[trainer]\nlearning_rate = 0.5\napi_key = 'hunter2'\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    steps = {0: {"eval/accuracy": 0.25}, 1: {"loss": 1 / 3, "odd, name": 2.0}, 4: {"loss": 1e-7, "eval/accuracy": 0.5}}
    sink = made(folder, experiment="maths", name="first-try", tags={"team": "a"}, artifacts=True, config=True)
    state = await sinks.recorded(sink, steps)
    [run] = runs(folder, "maths")
    assert run.info.run_id == state["id"]
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first-try", "FINISHED", "a")
    assert run.data.params == {"seed": "7", "trainer.learning_rate": "0.5"}
    assert history(folder, state["id"], "loss") == [(1, 1 / 3), (4, 1e-7)]
    assert history(folder, state["id"], "eval/accuracy") == [(0, 0.25), (4, 0.5)]
    assert history(folder, state["id"], "odd_ name") == [(1, 2.0)]
    assert {file.path for file in client(folder).list_artifacts(state["id"])} == {"config.toml", "metrics.jsonl"}
    assert not any(
        b"hunter2" in path.read_bytes()
        for path in (folder.parent / "mlruns").rglob("*")
        if "artifacts" not in path.parts and path.is_file()
    )


async def test_after_a_resume_no_step_is_there_twice_and_none_is_missing(folder, capsys):
    """The run that died had gone on for two steps after its checkpoint; one of them it had sent in part."""
    state = await sinks.recorded(made(folder), {0: {"a": 0.0}, 1: {"a": 1.0, "b": 1.0}})
    await sinks.recorded(made(folder), {2: {"a": 2.0, "b": 2.0}, 3: {"a": 3.0}}, state)
    capsys.readouterr()
    (folder / "config.toml").write_text("seed = 8\n")
    again = await sinks.recorded(
        made(folder), {2: {"a": -2.0, "b": -2.0}, 3: {"a": -3.0, "b": 3.5}, 4: {"a": 4.0}}, state
    )
    assert again == {"id": state["id"], "step": 4}
    assert history(folder, state["id"], "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(folder, state["id"], "b") == [(1, 1.0), (2, 2.0), (3, 3.5)]
    assert "MLflow already has steps 2 to 3" in " ".join(capsys.readouterr().err.split())
    [run] = runs(folder)
    assert (run.info.status, run.data.params["seed"]) == ("FINISHED", "8")


async def test_a_run_that_ends_early_is_no_finished_one(folder):
    (folder / "config.toml").write_text("seed = 7\n")
    await sinks.recorded(made(folder, config=False), {0: {"a": 0.0}, 1: {"a": 1.0}})
    [run] = runs(folder)
    assert (run.info.run_name, run.info.status, run.data.params) == ("my-run", "KILLED", {})


async def test_a_store_that_goes_away_neither_stops_nor_slows_a_run_and_gets_each_step_once_it_is_back(folder, capsys):
    sink = await sinks.opened(made(folder))
    run_id = sink.state()["id"]
    await sink.step(1, {"a": 1.0}, [])
    store, away = folder.parent / "mlruns", folder.parent / "away"
    while len(sink._waiting):
        await sinks_pause()
    store.rename(away)
    store.write_text("in the way")
    for step in (2, 3):
        await sink.step(step, {"a": float(step)}, [])
    said = ""
    while "trying again" not in said:
        await sinks_pause()
        said += capsys.readouterr().err
    store.unlink()
    away.rename(store)
    await sink.step(4, {"a": 4.0}, [])
    await sink.close()
    assert history(folder, run_id, "a") == [(step, float(step)) for step in (1, 2, 3, 4)]
    assert "does not accept step 2" in " ".join(said.split())
    assert "MLflow accepts metrics again" in " ".join(capsys.readouterr().out.split())


async def test_a_step_of_which_a_part_arrived_is_there_once_when_it_is_sent_again(folder, capsys):
    sink = await sinks.opened(made(folder))
    run_id = sink.state()["id"]
    await sink.step(1, {"a": 1.0, "b": 1.0}, [])
    while len(sink._waiting):
        await sinks_pause()
    [kept] = (folder.parent / "mlruns").glob(f"*/{run_id}/metrics/b")
    kept.rename(folder / "b")
    kept.mkdir()  # so that `a` of step 2 is written, and `b` is not
    await sink.step(2, {"a": 2.0, "b": 2.0}, [])
    said = ""
    while "trying again" not in said:
        await sinks_pause()
        said += capsys.readouterr().err
    assert history(folder, run_id, "a") == [(1, 1.0), (2, 2.0)], "a part of the step is there"
    kept.rmdir()
    (folder / "b").rename(kept)
    await sink.step(3, {"a": 3.0, "b": 3.0}, [])
    await sink.close()
    for name in ("a", "b"):
        assert history(folder, run_id, name) == [(step, float(step)) for step in (1, 2, 3)], name


async def test_what_a_killed_run_had_not_sent_is_sent_once_when_it_is_resumed(folder, capsys):
    sink = await sinks.opened(made(folder, finish_deadline_s=1))
    await sink.step(1, {"a, or": 1.0}, [])
    while len(sink._waiting):
        await sinks_pause()
    store, away = folder.parent / "mlruns", folder.parent / "away"
    store.rename(away)
    store.write_text("in the way")
    for step in (2, 3):
        await sink.step(step, {"a, or": float(step), "b": float("nan")}, [])
    saved = sink.state()
    await sink.close()  # it gives up, as one that is killed does
    store.unlink()
    away.rename(store)
    lines = [{"step": 1, "a, or": 1.0}, *({"step": step, "a, or": float(step), "b": None} for step in (2, 3))]
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 4, "a, or": 9.0}])
    )
    capsys.readouterr()
    await sinks.recorded(made(folder), {4: {"a, or": 4.0}}, saved)
    assert history(folder, saved["id"], "a_ or") == [(step, float(step)) for step in (1, 2, 3, 4)]
    assert [step for step, value in history(folder, saved["id"], "b") if math.isnan(value)] == [2, 3]
    assert not capsys.readouterr().err
    await sinks.recorded(made(folder), {4: {"a, or": -4.0}}, saved)  # killed again before the next checkpoint
    assert history(folder, saved["id"], "a_ or") == [(step, float(step)) for step in (1, 2, 3, 4)]
    assert "MLflow already has steps 4 to 4" in " ".join(capsys.readouterr().err.split())


async def sinks_pause():
    import asyncio

    await asyncio.sleep(0.02)


async def test_a_store_that_stays_away_is_named_at_the_end_with_what_it_lacks(folder, capsys):
    sink = await sinks.opened(made(folder, finish_deadline_s=3))
    shutil.rmtree(folder.parent / "mlruns")
    (folder.parent / "mlruns").write_text("in the way")
    await sink.step(1, {"a": 1.0}, [])
    await sink.close()
    await sink.close()
    assert "it lacks step 1. metrics.jsonl has all" in " ".join(capsys.readouterr().err.split())


async def test_where_runs_are_kept_must_be_said(folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"has no tracking URI(.|\n)*MLFLOW_TRACKING_URI"):
        await made(folder, tracking_uri=None).open()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{folder.parent}/mlruns")
    await sinks.recorded(made(folder, tracking_uri=None), {0: {"a": 0.0}})
    assert len(runs(folder)) == 1


async def test_a_server_that_is_not_there_and_a_uri_that_cannot_be_are_refused_before_the_first_step(
    folder, monkeypatch
):
    with pytest.raises(ConfigError, match="MLflow at gopher://x cannot record the run"):
        await made(folder, tracking_uri="gopher://x").open()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        port = silent.getsockname()[1]
        with pytest.raises(DeadlineExceeded, match=rf"MLflow at http://127.0.0.1:{port} did not answer within 1 s"):
            await made(folder, tracking_uri=f"http://me:hunter2@127.0.0.1:{port}", start_deadline_s=1).open()
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1 cannot record the run(.|\n)*metrics.jsonl has the same"):
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        await made(folder, tracking_uri="http://127.0.0.1:1").open()


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which sees every connection, is not installed")
def test_files_reach_no_network(tmp_path):
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from atropos_sinks.config import MlflowOptions\n"
        "from atropos_sinks.mlflow_sink import MlflowSink\n"
        "async def main(folder):\n"
        "    sink = MlflowSink(MlflowOptions(tracking_uri=f'file:{folder}/mlruns'), folder, 0)\n"
        "    await sink.open(); await sink.step(0, {'a': 1.0}, []); await sink.close()\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    trace = tmp_path / "trace"
    command = [
        "strace",
        "-f",
        "-qq",
        "-e",
        "trace=connect,sendto,sendmsg",
        "-o",
        str(trace),
        sys.executable,
        "-c",
        script,
    ]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=200)
    assert not re.findall(r"AF_INET6?\b", trace.read_text())
    assert list(tmp_path.glob("mlruns/*/*/metrics/a"))
