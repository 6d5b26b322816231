"""The sink `mlflow` and a server of MLflow's own, in a process of its own, killed with -9 while a run goes on: `make test-mlflow`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import TOY, metrics_of
from tests.e2e.runs import RunningRun, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
if "MLFLOW_PYTHON" not in os.environ:
    pytest.skip(
        "MLFLOW_PYTHON names no interpreter with the whole of mlflow: `make test-mlflow`", allow_module_level=True
    )

START_S = 300  # on a loaded machine; ten without


class Server:
    """On the loopback, over sqlite; its processes are a group of their own."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [
            os.path.abspath(os.environ["MLFLOW_PYTHON"]),
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        environment |= {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # or it leaves files
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--artifacts-destination", str(self._folder / "artifacts")],
                cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._answers():
            said = (self._folder / "server.log").read_text()
            assert self._process.poll() is None and time.monotonic() < until, f"MLflow's server did not start:\n{said}"
            time.sleep(0.2)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as end:
                end.settimeout(5)
                end.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                return b" 200 " in end.recv(100)
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("mlflow"))
    try:
        made.start()
        yield made
    finally:
        made.kill()


@pytest.fixture
def begin(server, tmp_path):
    """A run in `tmp_path / "run"` that records there, of so many steps."""
    (tmp_path / "sevens.py").write_text(TOY)
    begun = []

    def begin(steps, *more):
        folder = tmp_path / "run"
        begun.append(
            RunningRun(
                folder,
                "run",
                "--model",
                "toy",
                "--env",
                f"{tmp_path}/sevens.py:Sevens",
                "--dir",
                str(folder),
                "--steps",
                str(steps),
                "--set",
                f"sink.mlflow.tracking_uri={server.uri}",
                "--set",
                f"sink.mlflow.experiment={tmp_path.name}",
                "--set",
                "sink.jsonl.use=jsonl",
                "--set",
                "checkpoint.every=5",
                *more,
            )
        )
        return begun[-1]

    yield begin
    for run in begun:
        run.process.kill()


def recorded(server, experiment):
    """Status and {step: values} of the experiment's one run."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=server.uri)
    [run] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    values = {}
    for one in client.get_metric_history(run.info.run_id, "reward/mean"):
        values.setdefault(one.step, []).append(one.value)
    return run.info.status, values


def expected(folder):
    return {line["step"]: [line["reward/mean"]] for line in metrics_of(folder) if "reward/mean" in line}


def test_a_killed_run_that_is_resumed_has_each_step_once(server, begin, tmp_path):
    run = begin(4000)
    run.wait_for_step(12)
    run.kill("supervisor")
    run.process.wait(60)
    status, _ = recorded(server, tmp_path.name)
    assert status == "RUNNING"
    finish(run.folder, "resume", str(run.folder), "--set", "training.steps=40")
    status, values = recorded(server, tmp_path.name)
    assert status == "FINISHED"
    assert sorted(values) == sorted(expected(run.folder)) and all(len(one) == 1 for one in values.values())


def test_a_run_whose_server_stays_away_ends_and_names_what_it_lacks(server, begin):
    run = begin(40, "--set", "sink.mlflow.finish_deadline_s=3")
    run.wait_for_step(3)
    server.kill()
    try:
        assert run.process.wait(120) == 0
        assert "it lacks step" in run.text and "metrics.jsonl has" in run.text
        assert len(metrics_of(run.folder)) == 41
    finally:
        server.start()
