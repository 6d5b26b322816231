"""A warm start and TRL's SFTTrainer: the same tokens and mask of each row, the same loss and gradient of a batch. `make test-export`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atropos_core.config.run_file import WarmupSection
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.warm_start import WarmStart
from atropos_env_dataset.completions import open_completions
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "TRL_PYTHON" not in os.environ, reason="needs TRL in a separate environment: `make test-export`"
    ),
]
PROGRAM = Path(__file__).parent / "supervised.py"
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
# The tiny policy's template, with the marks by which TRL finds what the assistant says.
MARKED = (
    "{%- for message in messages -%}{%- if message.role == 'user' -%}<|user|>{{ message.content }}"
    "{%- elif message.role == 'assistant' -%}<|assistant|>{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SUMS = [(f"What is {a} + {b}?", f"{a} + {b} = {a + b} #### {a + b}") for a, b in ((2, 3), (10, 5), (7, 70), (21, 4))]
FORMS = {
    "prompt and completion": [{"prompt": [user(one)], "completion": [says(other)]} for one, other in SUMS],
    "messages": [{"messages": [user(one), says(other), user("Again."), says(other[-3:])]} for one, other in SUMS],
}


def beside_trl(rows: list[dict[str, Any]], model: Path, folder: Path, template: str = "") -> dict[str, Any]:
    (data := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = subprocess.run(
        [os.environ["TRL_PYTHON"], str(PROGRAM), str(data), str(model), str(folder), template],
        capture_output=True, text=True, timeout=500, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"gradient": load_file(folder / "gradient.safetensors")}


async def check_beside_trl(
    rows: list[dict[str, Any]], model: Path, folder: Path, template: str = "", within: float = 1e-6
) -> None:
    """Hold the rows' tokens and masks to TRL's exactly, and the loss and the gradient of the batch to `within`."""
    theirs = beside_trl(rows, model, folder, template)
    section = WarmupSection(data=folder / "rows.jsonl", held_out=0, rows_per_step=len(rows), steps=1)
    ours = open_completions(section, ChatTokenizer(model), max_tokens=10_000, seed=0)
    for row, other in zip(ours.trained, theirs["rows"], strict=True):
        assert row.tokens.tolist() == other["input_ids"]
        assert row.trained.tolist() == [label != -100 for label in other["labels"]]
    context = RunContext(folder, model, transport="checkpoint", threads=1)
    trainer = GrpoTrainer(GrpoOptions(dtype="float32", max_grad_norm=1e9), context)
    await trainer.open()
    gradient: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None
            gradient[name] = parameter.grad.clone()

    assert trainer._optimizer is not None
    trainer._optimizer._adam.register_step_pre_hook(look)
    metrics = await trainer.supervised_step(WarmStart(ours, 0.0).batch(1), 0.0)
    await trainer.close()
    assert metrics["warmup/loss"] == pytest.approx(theirs["loss"], abs=within * max(1.0, theirs["loss"]))
    assert gradient.keys() == theirs["gradient"].keys()
    largest = max(float(value.abs().max()) for value in theirs["gradient"].values())
    assert largest > 0.01
    for name, value in theirs["gradient"].items():
        torch.testing.assert_close(
            gradient[name],
            value,
            atol=within * max(1.0, largest),
            rtol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("form", FORMS)
async def test_tokens_loss_and_gradient_of_a_batch_are_those_of_trl(form: str, tmp_path: Path) -> None:
    await check_beside_trl(FORMS[form], TINY, tmp_path, MARKED if form == "messages" else "")
