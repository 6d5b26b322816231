"""The tiny policy, trained by four processes over HTTP; a worker on what looks like another machine; a killed engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.roles import Role, Scene, scene

pytestmark = pytest.mark.slow

SMALL = ("--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "checkpoint.every=2")


@pytest.mark.long  # the test after it shows the same of eight steps, but for the gain
@pytest.mark.timeout(600)
def test_four_processes_train_the_tiny_policy(tmp_path):
    with scene(tmp_path) as place:
        trainer = place.train("--env", "gsm8k", "--steps", "25")
        workers = [place.worker(number, "gsm8k") for number in (1, 2)]
        assert trainer.ends(540) == 0, place.all_text
        lines = place.metrics
        assert lines[-1]["eval/problems"] >= 500
        assert lines[-1]["eval/accuracy"] >= lines[0]["eval/accuracy"] + 0.15
        assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
        for worker in workers:
            assert worker.terminate() == 0
            assert int(worker.says(r"(\d+) groups sent")) > 0
        assert place.server.terminate() == 0


def test_a_killed_engine_restarts_the_trainer_and_its_workers_go_on(tmp_path):
    with scene(tmp_path) as place:
        trainer = place.train(
            "--env", "gsm8k", "--steps", "8", *SMALL, "--set", "evaluation.problems=8", "--set", "restarts=1"
        )
        workers = [place.worker(number, "gsm8k") for number in (1, 2)]
        place.wait_for_step(4, trainer)
        children = {
            child.cmdline()[-1]: child for child in psutil.Process(trainer.process.pid).children(recursive=True)
        }
        children["engine"].kill()
        assert trainer.ends(180) == 0, place.all_text
        assert "starting again from the last checkpoint (0 more times at most)" in trainer.text
        assert [line["step"] for line in place.metrics] == list(range(9))
        assert max(line["alignment/max_abs_logprob_diff"] for line in place.metrics) <= 1e-4
        for worker in workers:
            assert worker.terminate() == 0
            assert int(worker.says(r"(\d+) groups sent")) > 0
        assert place.server.terminate() == 0


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[str]]]:
    """Our address as another network namespace sees it, and what a command there begins with."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a second network namespace needs root and the command `ip`")
    name = f"atropos{os.getpid() % 10000}"
    ours, theirs = f"av{os.getpid() % 10000}a", f"av{os.getpid() % 10000}b"
    net = f"10.213.{os.getpid() % 250}"
    made = [
        f"netns add {name}",
        f"link add {ours} type veth peer name {theirs} netns {name}",
        f"addr add {net}.1/24 dev {ours}",
        f"link set {ours} up",
        f"-n {name} addr add {net}.2/24 dev {theirs}",
        f"-n {name} link set {theirs} up",
    ]
    try:
        for command in made:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no second network namespace can be made here: ip {command}: {done.stderr.strip()}")
        yield f"{net}.1", ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "link", "delete", ours], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_worker_on_another_network_trains_with_the_token_and_is_refused_without(tmp_path, elsewhere):
    address, there = elsewhere
    (tmp_path / "token").write_text("a-word-of-many-letters")
    (tmp_path / "token").chmod(0o600)
    token = ("--token-file", "token")
    with scene(tmp_path, "--host", address, *token) as place:
        assert place.url.startswith(f"http://{address}:")
        trainer = place.train("--steps", "2", *SMALL, *token, "--engine-address", f"{address}:0")
        refused = from_there(place, there, "refused", "--model", "tiny")
        assert refused.ends() == 1
        assert "AccessRefused" in refused.text
        assert "needs a token" in refused.text
        worker = from_there(place, there, "worker", *token)
        assert trainer.ends(180) == 0, place.all_text
        assert worker.terminate() == 0, worker.text
        assert "a-word-of-many-letters" not in place.all_text


def test_a_server_for_other_machines_wants_a_token(tmp_path, elsewhere):
    address, _ = elsewhere
    place = Role(tmp_path, "serve", ["serve", "--host", address, "--port", "0"])
    assert place.ends() == 2
    assert "--token-file" in place.text


def from_there(place: Scene, there: list[str], name: str, *more: str) -> Role:
    return place.start(name, "env", "gsm8k", "--api", place.url, *more, before=there)
