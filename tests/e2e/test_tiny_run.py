"""The default run, cut short: the tiny policy, generated problems, three processes, one copy of the weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.conftest import metrics_of, plant
from tests.e2e.runs import RunningRun

pytestmark = pytest.mark.slow

SHORT = ("run", "--bridge", "ipc", "--env", "gsm8k", "--set", "evaluation.problems=256")


@dataclass(frozen=True)
class Seen:
    """What a process of the run had mapped in the middle of it."""

    segments: frozenset[tuple[str, str]]  # device and inode
    libraries: frozenset[str]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunningRun, dict[str, Seen]]:
    """The quickstart, started as a user starts it."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLD", "1")
        run = RunningRun(folder, *SHORT, "--steps", "16", "--dir", str(folder))
    run.wait_for_step(2)
    found = {role: seen_in(process) for role, process in {**run.children, "supervisor": run.supervisor}.items()}
    assert run.ended_within(240) == 0, run.text
    return run, found


def seen_in(process: psutil.Process) -> Seen:
    maps = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    segments = frozenset((columns[3], columns[4]) for columns in maps if len(columns) > 5 and "memfd:" in columns[5])
    return Seen(segments, frozenset(Path(columns[5]).name for columns in maps if len(columns) > 5))


@pytest.fixture(scope="module")
def trained(watched: tuple[RunningRun, dict[str, Seen]]) -> RunningRun:
    return watched[0]


def test_accuracy_rises_within_a_few_steps(trained):
    lines = metrics_of(trained.folder)
    assert 0.35 <= lines[0]["eval/accuracy"] <= 0.55, "the tiny policy starts with headroom"
    assert lines[-1]["eval/accuracy"] >= lines[0]["eval/accuracy"] + 0.08
    assert lines[-1]["eval/problems"] >= 250


def test_engine_and_trainer_agree_at_every_step_while_the_policy_moves(trained):
    lines = metrics_of(trained.folder)
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
    assert max(line["policy/probe_shift_nats"] for line in lines) > 0.5
    assert sum(line["bridge/bytes_copied"] for line in lines) == 0


def test_a_publish_takes_milliseconds(trained):
    publish = sorted(line["bridge/publish_s"] for line in metrics_of(trained.folder)[1:])
    assert publish[len(publish) // 2] < 0.1


def test_the_saved_policy_loads_with_transformers_and_evaluates_alike(trained, atropos):
    ended = atropos("eval", str(trained.folder), "--out", "problems.jsonl")
    assert ended.code == 0, ended.err
    accuracy = float(re.search(r"^ ?accuracy +(\S+)", ended.out, re.M)[1])
    assert accuracy == pytest.approx(metrics_of(trained.folder)[-1]["eval/accuracy"], abs=0.006)


def test_engine_and_trainer_map_the_same_memory_and_the_supervisor_no_torch(watched):
    _, found = watched
    assert found.keys() >= {"engine", "trainer", "supervisor"}
    assert found["engine"].segments & found["trainer"].segments, "one inode in both"
    others = [seen for role, seen in found.items() if role not in ("engine", "trainer")]  # one watches the other
    assert not [name for seen in others for name in seen.libraries if "torch" in name]
    assert [name for name in found["engine"].libraries if "torch" in name]


PLANTED = """
from atropos_bridge_ipc.trainer_extension import TrainerExtension
from atropos_bridge_ipc.bridge import IpcBridge
from atropos_bridge_ipc.config import IpcOptions
from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider


class Private(TrainerExtension):
    async def adopt(self, offer, descriptors=()):
        receipt = await super().adopt(offer, descriptors)
        for parameter in self.holder.model.parameters():
            parameter.data = parameter.data.clone()  # trains a copy that nobody samples from
        self.holder.weights_moved()
        return receipt


class Forgetful(IpcBridge):
    def extensions(self):
        return {**super().extensions(), "trainer": "forgetful:Private"}


@hookimpl
def atropos_bridges():
    yield BridgeProvider(
        "forgetful", "never publishes", IpcOptions, Forgetful, transports=lambda options: frozenset({"posix_shm"}),
        announces=lambda options: {"weight_transfer": "atropos_ipc"},  # for an engine with a server
    )
"""


def test_a_run_whose_publish_is_skipped_stops_with_the_named_error(atropos, tmp_path):
    plant(tmp_path, "forgetful", PLANTED)
    ended = atropos(
        "run", "--bridge", "forgetful", "--env", "gsm8k", "--steps", "20", "--set", "evaluation.problems=8",
        "--dir", "run", PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert ended.code == 1
    assert "Misaligned" in ended.err
    assert "does not sample from the weights that the trainer published" in ended.err
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2, "found at the first step after the first update"


def test_real_gsm8k_files_train_through_source_path(atropos, tmp_path):
    data = Path(__file__).parents[3] / "shared/data/gsm8k"
    if not (data / "train.jsonl").exists():
        pytest.skip(f"the GSM8K files are not at {data}")
    ended = atropos(
        "run", "--env", "gsm8k", "--steps", "2", "--set", "environment.gsm8k.source=path",
        "--set", f"environment.gsm8k.path={data}", "--set", "evaluation.problems=16", "--dir", "run",
        "--set", "training.refill_rounds=1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert len(rows) >= 128
