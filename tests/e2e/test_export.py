"""`atropos export` of real runs: the policy that is exported is the policy of the run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOY
from tests.e2e.runs import finish
from tests.pages.blocks import the_block

pytestmark = pytest.mark.slow

LORA = (
    "--env", "gsm8k", "--bridge", "lora", "--steps", "2", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "evaluation.problems=8", "--set", "trainer.lora.learning_rate=0.01", "--set", "checkpoint.every=1",
)  # fmt: skip
COMPARED = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
adapter, merged = (
    kind.from_pretrained(path) for kind, path in ((AutoPeftModelForCausalLM, "adapter"), (AutoModelForCausalLM, "merged"))
)
ids = AutoTokenizer.from_pretrained("merged").apply_chat_template(
    [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]
with torch.no_grad():
    of_adapter, of_merged = (model(ids).logits.log_softmax(-1) for model in (adapter, merged))
    with adapter.disable_adapter():
        of_base = adapter(ids).logits.log_softmax(-1)
assert (of_adapter - of_merged).abs().max() < 1e-4, (of_adapter - of_merged).abs().max()
assert (of_base - of_merged).abs().max() > 1e-3, "the adapter does something"
"""


def test_a_run_of_an_adapter_exports_it_and_merged_the_same_policy(atropos: Callable[..., Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    finish(run, "run", *LORA, "--dir", str(run))
    for name, flags in (("adapter", ()), ("merged", ("--merged",)), ("before", ("--step", "1"))):
        ended = atropos("export", "run", "--as", "hf", "--out", name, *flags)
        assert ended.code == 0, ended.err
    ended = subprocess.run(
        [sys.executable, "-c", COMPARED], cwd=tmp_path, capture_output=True, text=True, timeout=200,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("before", "adapter")]
    assert weights[0] != weights[1] == (run / "checkpoints/step-000002/policy/adapter_model.safetensors").read_bytes()
    card = (tmp_path / "merged/README.md").read_text()
    after = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert re.search(rf"\| accuracy \| .*% \| {after['eval/accuracy']:.1%} \|", card)
    assert str(tmp_path) not in card


def test_the_commands_and_the_example_of_the_page_run(tmp_path: Path) -> None:
    """Of a run of the toy policy, but for what wants a model: that has a test of its own."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "sevens.py").write_text(TOY)
    small = ("--steps", "12", "--set", "evaluation.problems=0", "--set", "trainer.learning_rate=20.0")
    finish(
        tmp_path / "runs/mine",
        "run",
        "--model",
        "toy",
        "--env",
        f"{tmp_path}/sevens.py:Sevens",
        *small,
        "--dir",
        str(tmp_path / "runs/mine"),
    )

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=200,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    for line in the_block("docs/export.md", "atropos export runs/mine").commands:
        words = line.split()[1:]
        if "sft" in words or "dpo" in words:
            words.append("--keep-cut-off")  # the toy policy ends no reply
        ended = typed("-m", "atropos_core", *words)
        assert ended.returncode == 0 or ("hf" in words and "is not a policy in Hugging Face form" in ended.stderr), (
            ended.stderr
        )
    ended = typed("-c", the_block("docs/export.md", "import atropos_core").text)
    assert ended.returncode == 0 and "7" in ended.stdout.splitlines()[-1], ended.stderr
    [command] = the_block("docs/export.md", "atropos process").commands
    ended = typed("-m", "atropos_core", *command.split()[1:], "--seed", "1")
    assert ended.returncode == 0 and len((tmp_path / "live.jsonl").read_text().splitlines()) > 1, ended.stderr
