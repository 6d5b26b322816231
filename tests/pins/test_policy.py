"""A policy that an earlier Atropos saved is read by this one, moments and all, and this one saves the same."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pins.policy import KINDS, RECORDED, batches, logprobs, opened, step

CLOSE = 1e-5  # nats: other processors and releases of torch add up in another order
DRIFT = 1e-4  # of what two steps move: Adam divides small gradients by their own size, rounding and all


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    with tarfile.open(RECORDED) as packed:
        packed.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "whole")
async def test_a_policy_of_an_earlier_atropos_is_restored_and_trained_on_as_it_was(left: Path, kind: str) -> None:
    made = batches(left)
    start, end = np.load(left / kind / "logprobs.npy")
    assert np.abs(end - start).max() > 100 * CLOSE, "two steps are seen in what is recorded"
    async with opened(left, kind) as trainer:
        await trainer.restore(left / kind / "checkpoint")
        assert np.abs(await logprobs(trainer, made[0]) - start).max() < CLOSE
        await step(trainer, made[2:])
        assert np.abs(await logprobs(trainer, made[0]) - end).max() < DRIFT * np.abs(end - start).max()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind or "whole")
async def test_what_is_saved_has_the_files_the_tensors_and_the_state_that_it_had(
    left: Path, kind: str, tmp_path: Path
) -> None:
    async with opened(left, kind) as trainer:
        await trainer.restore(left / kind / "checkpoint")
        await trainer.save(tmp_path)
    assert described(tmp_path) == described(left / kind / "checkpoint")


def test_anyone_can_load_what_was_saved(left: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(left / "checkpoint").eval()
    first = batches(left)[0]
    row = torch.from_numpy(first.tokens[: first.offsets[1]]).long()
    of_each = torch.log_softmax(model(row[None]).logits[0, :-1], -1).gather(1, row[1:, None])[:, 0].detach().numpy()
    recorded = np.load(left / "logprobs.npy")[0][1 : len(row)]
    assert np.abs(of_each - recorded).max() < CLOSE
    assert AutoTokenizer.from_pretrained(left / "checkpoint")("w5 w9").input_ids[-2:] == [5, 9]


def described(folder: Path) -> dict[str, Any]:
    """Its files; of each with tensors, where they are, their shapes and their types."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                found[path.name] = {name: shape_of(tensors.get_tensor(name)) for name in tensors.keys()}  # noqa: SIM118
        elif path.suffix == ".pt":
            found[path.name] = shape_of(torch.load(path, weights_only=True))
        else:
            found[path.name] = None
    return found


def shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, dict):
        return {name: shape_of(entry) for name, entry in value.items()}
    return [shape_of(entry) for entry in value] if isinstance(value, (list, tuple)) else type(value).__name__
