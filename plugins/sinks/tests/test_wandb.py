"""Weights & Biases for real, offline: what its own service wrote, read off the file; and no network."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys

import psutil
import pytest

from atropos_core.errors import ConfigError, ProcessDied
from atropos_sinks.config import WandbOptions
from atropos_sinks.settings_without_secrets import without_secrets
from atropos_sinks.wandb_sink import WandbSink
from tests import sinks
from tests.wandb_records import history, runs


async def recorded(folder, steps, state=None, **options):
    return await sinks.recorded(WandbSink(WandbOptions(**{"mode": "offline", **options}), folder), steps, state)


def services():
    return [one for one in psutil.Process().children(recursive=True) if "wandb-core" in one.name()]


async def test_an_offline_run_is_written_with_all_that_was_requested(tmp_path):
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "config.toml").write_text("seed = 7\n[trainer]\nlearning_rate = 0.5\napi_key = 'hunter2'\n")
    steps = {0: {"eval/accuracy": 0.25}, 1: {"loss": 1 / 3, "odd": float("nan")}, 2: {"loss": 1e-7}}
    state = await recorded(folder, steps, project="maths", group="sweep", tags=("a", "b"), entity="us")
    written = history(folder)
    assert written[0] == steps[0]
    assert written[1]["loss"] == 1 / 3 and written[1]["odd"] in ("NaN", pytest.approx(float("nan"), nan_ok=True))
    assert written[2] == steps[2]
    [run] = runs(folder)
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == ("maths", "my-run", "sweep", ["a", "b"])
    assert run.entity == "us"
    assert run.run_id == state["id"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["seed"] == 7
    assert config["trainer"] == {"learning_rate": 0.5}
    assert not services(), "its service ends with the run"
    assert not any(b"hunter2" in path.read_bytes() for path in folder.glob("wandb/**/*") if path.is_file())


async def test_a_resumed_run_goes_on_under_the_same_id(tmp_path):
    state = await recorded(tmp_path, {0: {"a": 0.0}, 1: {"a": 1.0}})
    assert state["step"] == 1
    await asyncio.sleep(1.1)  # offline folders are named by the second
    again = await recorded(tmp_path, {2: {"a": 2.0}}, state, name="another name")
    assert again == {"id": state["id"], "step": 2}
    assert [run.display_name for run in runs(tmp_path)] == [tmp_path.name, "another name"]
    assert {run.run_id for run in runs(tmp_path)} == {state["id"]}
    assert len(runs(tmp_path)) == 2
    assert history(tmp_path) == {0: {"a": 0.0}, 1: {"a": 1.0}, 2: {"a": 2.0}}


async def test_a_service_that_dies_is_a_named_error_at_the_next_step_and_the_end_does_not_hang(tmp_path, capsys):
    sink = WandbSink(WandbOptions(mode="offline"), tmp_path)
    await sink.open()
    await sink.step(0, {"a": 0.0}, [])
    [service] = services()
    service.kill()
    service.wait(60)
    with pytest.raises(ProcessDied, match=r"takes no more metrics(.|\n)*atropos resume"):
        for step in range(1, 1000):
            await sink.step(step, {"a": 0.0}, [])
            await asyncio.sleep(0.05)
    await asyncio.wait_for(sink.close(), 60)
    assert "Weights & Biases ended early" in " ".join(capsys.readouterr().err.split())


async def test_disabled_writes_nothing(tmp_path):
    await recorded(tmp_path, {0: {"a": 0.0}}, mode="disabled")
    assert not list(tmp_path.iterdir())


async def test_online_without_a_login_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"refuses the run(.|\n)*sink.wandb.mode=offline"):
        await recorded(tmp_path, {0: {"a": 0.0}}, mode="online")


def test_a_server_that_does_not_answer_is_an_error_within_the_deadline_and_the_key_is_printed_nowhere(tmp_path):
    """Runs in a separate process: W&B remembers a login until its process ends."""
    key = "0123456789abcdef" * 2 + "fedcba98"
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from atropos_core.errors import DeadlineExceeded\n"
        "from atropos_sinks.config import WandbOptions\n"
        "from atropos_sinks.wandb_sink import WandbSink\n"
        "try: asyncio.run(WandbSink(WandbOptions(start_deadline_s=3), Path(sys.argv[1])).open())\n"
        "except DeadlineExceeded as error: sys.exit(f'told: {error}')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        env={
            "WANDB_API_KEY": key,
            "WANDB_BASE_URL": "http://127.0.0.1:9",
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "told: Weights & Biases cannot be reached" in ended.stderr, ended.stderr
    assert key not in ended.stdout + ended.stderr
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace, which sees every connection, is not installed")
def test_offline_reaches_no_network(tmp_path):
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from atropos_sinks.config import WandbOptions\n"
        "from atropos_sinks.wandb_sink import WandbSink\n"
        "async def main(folder):\n"
        "    sink = WandbSink(WandbOptions(mode='offline'), folder)\n"
        "    await sink.open(); await sink.step(0, {'a': 1.0}, []); await sink.close()\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    trace = tmp_path / "trace"
    calls = "trace=connect,sendto,sendmsg"
    subprocess.run(
        ["strace", "-f", "-qq", "-e", calls, "-o", trace, sys.executable, "-c", script, tmp_path],
        check=True,
        timeout=200,
    )
    written = trace.read_text()
    assert "AF_UNIX" in written or "127.0.0.1" in written, "the trace sees how W&B talks to its service"
    reached = re.findall(r"inet_addr\(\"([^\"]+)\"\)|inet_pton\(AF_INET6, \"([^\"]+)\"", written)
    assert {one or other for one, other in reached} <= {"127.0.0.1", "::1"}, reached
    assert history(tmp_path) == {0: {"a": 1.0}}


def test_what_is_named_like_a_secret_is_not_sent():
    values = {
        "judge": {"api_key": "x", "token": "x", "max_tokens": 256, "key": "x", "token_file": "f"},
        "hub_token": "x", "password": "x", "model": "tiny", "keys": ["kept: no text"],
    }  # fmt: skip
    assert without_secrets(values) == {
        "judge": {"max_tokens": 256, "token_file": "f"}, "model": "tiny", "keys": ["kept: no text"]
    }  # fmt: skip
