"""A base in 4 bits, as a user has it: rounded by a command, trained beside, killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Ended, metrics_of
from tests.e2e.runs import QUICK, RunningRun, finish
from tests.pages.blocks import BLOCKS

SMALL = ("--set", "training.groups_per_step=2", "--set", "training.group_size=4", "--set", "evaluation.problems=8")
HELD = ("--bridge", "lora", "--set", "trainer.lora.quantization=nf4")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounded")
    finish(folder, "quantize", "tiny", str(folder / "tiny-nf4"))
    return folder / "tiny-nf4"


def adapter(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step-{step:06d}/policy/adapter_model.safetensors").read_bytes()


def test_the_commands_of_the_page_round_and_train(atropos: Callable[..., Ended], tmp_path: Path) -> None:
    (block,) = [one for one in BLOCKS if one.first.startswith("atropos quantize")]
    quantize, run = block.text.strip().splitlines()
    said = atropos(*quantize.split()[1:])
    assert said.code == 0, said.err
    assert "28 linear layers with 688,128 weights are rounded to nf4 in tiny-nf4" in said.out
    ended = atropos(*run.split()[1:], "--steps", "2", "--dir", "held", *SMALL)
    assert ended.code == 0, ended.err
    for line in metrics_of(tmp_path / "held")[1:]:
        assert line["alignment/max_abs_logprob_diff"] < 1e-4


@pytest.mark.parametrize("killed", ["trainer", "supervisor"])
def test_a_killed_run_beside_it_resumes_to_the_same_bits(killed: str, rounded: Path, tmp_path: Path) -> None:
    wanted = ("run", *QUICK, "--model", str(rounded), *HELD)
    whole = finish(tmp_path / "whole", *wanted, "--dir", str(tmp_path / "whole"))
    # An engine that holds the base so as well samples the same.
    run = RunningRun(
        tmp_path / "killed", *wanted, "--set", "engine.quantization=nf4", "--dir", str(tmp_path / "killed")
    )
    run.wait_for_step(4)
    run.kill(killed)
    assert run.ended_within(60) != 0
    finish(tmp_path / "killed", "resume", str(tmp_path / "killed"))
    assert adapter(tmp_path / "killed", 9) == adapter(whole.folder, 9)


def test_what_cannot_be_is_one_named_error(atropos: Callable[..., Ended], tmp_path: Path, rounded: Path) -> None:
    taken = atropos("quantize", "tiny", str(tmp_path))
    assert taken.code == 2
    assert "already exists" in taken.err
    (tmp_path / "empty").mkdir()
    for model in ("./nothing", "./empty"):
        refused = atropos("quantize", model, "out")
        assert refused.code == 2
        assert "Traceback" not in refused.err
        assert not (tmp_path / "out").exists()
    unrounded = atropos("run", "--env", "gsm8k", "--model", "tiny", *HELD, "--steps", "1", *SMALL)
    assert unrounded.code == 2, unrounded.err
    assert "is not: the engines would sample from another model" in unrounded.err
    assert "atropos quantize MODEL DIRECTORY --format nf4 --dtype float32" in unrounded.err
    whole = atropos(
        "run", "--env", "gsm8k", "--model", str(rounded), "--bridge", "ipc", *HELD[2:], "--steps", "1", *SMALL
    )
    assert whole.code == 2, whole.err
    assert "ipc" in whole.err


def test_a_base_is_rounded_in_the_dtype_that_the_run_has_it_in(
    atropos: Callable[..., Ended], tmp_path: Path, rounded: Path
) -> None:
    in_16_bits = ("--set", "engine.dtype=bfloat16", "--set", "trainer.dtype=bfloat16")
    run = ("run", "--env", "gsm8k", *HELD, *in_16_bits, "--steps", "2", *SMALL)
    other = atropos(*run, "--model", str(rounded))
    assert other.code == 2, other.err
    assert "--dtype bfloat16" in other.err
    assert atropos("quantize", "tiny", "half", "--dtype", "bfloat16").code == 0
    weights = load_file(tmp_path / "half/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    ended = atropos(*run, "--model", "./half", "--dir", "held")
    assert ended.code == 0, ended.err
    for line in metrics_of(tmp_path / "held")[1:]:
        assert line["alignment/max_abs_logprob_diff"] < 0.5


def test_a_lora_is_trained_with_a_base_in_8_bits_in_engine_and_trainer(
    atropos: Callable[..., Ended], tmp_path: Path
) -> None:
    said = atropos("quantize", "tiny", "tiny-int8", "--format", "int8")
    assert said.code == 0, said.err
    run = ("--bridge", "lora", "--set", "trainer.lora.quantization=int8", "--set", "engine.quantization=int8")
    assert "--set trainer.lora.quantization=int8" in said.out
    ended = atropos("run", "--env", "gsm8k", "--model", "./tiny-int8", *run, "--steps", "2", "--dir", "held", *SMALL)
    assert ended.code == 0, ended.err
    for line in metrics_of(tmp_path / "held")[1:]:
        assert line["alignment/max_abs_logprob_diff"] < 1e-4
