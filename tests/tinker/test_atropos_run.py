"""`atropos run --trainer tinker` against our own server, over the official client: the weights of trainer `grpo`, also across a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.pages.blocks import BLOCKS
from tests.pages.typed import SMALL
from tests.tinker.server import CLIENT, TinkerServer
from tests.waiting import wait_until

RUN_S = 400
KEY = "tml-a-key-that-nothing-writes-down"
STEPS = 3
SHARED = [
    "--env", "gsm8k", "--model", "tiny", "--steps", str(STEPS), "--set", "seed=3", "--set", "training.groups_per_step=4",
    "--set", "training.group_size=4", "--set", "evaluation.problems=4", "--set", "checkpoint.every=1",
    "--set", "checkpoint.keep=9", "--set", "trainer.loss=grpo", "--set", "trainer.eps=1e-4", "--set", "trainer.betas=[0.9,0.95]",
]  # fmt: skip
AT_THE_SERVER = [
    "--trainer", "tinker", "--set", "trainer.dtype=float32", "--set", "trainer.rank=8", "--set", "trainer.train_head=false",
    "--set", "trainer.learning_rate=1e-3",
]  # fmt: skip
HERE = [
    "--trainer", "grpo", "--engine", "hf", "--bridge", "lora", "--set", "trainer.lora.rank=8", "--set", "trainer.lora.alpha=32",
    "--set", "trainer.lora.learning_rate=1e-3", "--set", "trainer.warmup_steps=0",
]  # fmt: skip


@cache
def packages_of_the_client() -> str:
    asked = [str(Path(CLIENT).absolute()), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def start(server: TinkerServer, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    variables = {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": KEY,
        "PYTHONPATH": packages_of_the_client(),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "atropos_core", *arguments], stdout=out, stderr=out, env=os.environ | variables
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.wait(RUN_S) == 0, log.read_text()[-3000:]


def weights(directory: Path) -> dict[str, Any]:
    return load_file(directory / "adapter_model.safetensors")


def at_the_server(server: TinkerServer, run: Path, step: int) -> dict[str, Any]:
    saved = json.loads((run / f"checkpoints/step-{step:06d}/policy/tinker.json").read_text())
    return weights(server.adapter(saved["path"]))


@pytest.fixture(scope="module")
def trained(server: TinkerServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the server."""
    directory = tmp_path_factory.mktemp("trained")
    run, log = directory / "run", directory / "log"
    finish(start(server, log, "run", *SHARED, *AT_THE_SERVER, "--dir", str(run)), log)
    return run


def test_a_run_with_our_own_server_trains_the_weights_of_trainer_grpo(
    server: TinkerServer, trained: Path, tmp_path: Path
) -> None:
    finish(start(server, tmp_path / "log", "run", *SHARED, *HERE, "--dir", str(tmp_path / "run")), tmp_path / "log")
    moved = 0.0
    first = weights(tmp_path / "run/checkpoints/step-000001/policy")
    for step in range(1, STEPS + 1):
        there = at_the_server(server, trained, step)
        here = weights(tmp_path / f"run/checkpoints/step-{step:06d}/policy")
        assert there.keys() == here.keys()
        assert max(abs(there[name] - here[name]).max() for name in here) < 1e-5
        moved = max(abs(first[name] - here[name]).max() for name in here)
    assert moved > 1e-4
    steps = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert max(one.get("alignment/max_abs_logprob_diff", 0) for one in steps) < 1e-4
    assert max(one.get("alignment/fresh_tokens", 0) for one in steps) > 10


@pytest.mark.parametrize("page", ["docs/tinker.md", "plugins/tinker_client/README.md"])
def test_the_command_of_the_page_trains(server: TinkerServer, tmp_path: Path, page: str) -> None:
    [block] = [one for one in BLOCKS if one.page == page and "atropos run --trainer tinker" in one.text]
    command = next(one for one in block.commands if one.startswith("atropos run"))
    arguments = ["tiny" if one == "DIRECTORY" else one for one in command.split()[1:]]
    run = tmp_path / "run"
    finish(
        start(server, tmp_path / "log", *arguments, *SMALL.split(), "--steps", "1", "--dir", str(run)), tmp_path / "log"
    )
    [_, step] = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert step["alignment/max_abs_logprob_diff"] < 1e-4


def test_a_run_that_is_killed_continues_from_the_state_at_the_server(
    server: TinkerServer, trained: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(server, log, "run", *SHARED, *AT_THE_SERVER, "--dir", str(run))
    wait_until(lambda: (run / "checkpoints/step-000001/manifest.json").exists(), "a first checkpoint", RUN_S)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    finish(start(server, log, "resume", str(run)), log)
    first, resumed, whole = (
        at_the_server(server, run, 1),
        at_the_server(server, run, STEPS),
        at_the_server(server, trained, STEPS),
    )
    # Not bit for bit: which of a step's requests share a batch at the server depends on when they arrive, which moves logprobs by rounding.
    assert max(abs(whole[name] - resumed[name]).max() for name in whole) < 1e-5
    assert max(abs(whole[name] - first[name]).max() for name in whole) > 1e-4


def test_the_key_is_in_no_file_and_in_nothing_that_is_printed(server: TinkerServer, trained: Path) -> None:
    files = [file for file in trained.parent.rglob("*") if file.is_file()]
    assert {"log", "config.toml", "metrics.jsonl", "tinker.json"} <= {file.name for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
