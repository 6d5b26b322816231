"""The Triton kernels of the language-model head where there is no GPU: by Triton's interpreter, and compiled for an H100."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.skipif(
    "TRITON_PYTHON" not in os.environ, reason="needs triton in an environment of its own: `make test-gpu`"
)


def run(*command: str, **variables: str) -> str:
    ended = subprocess.run(
        [os.environ["TRITON_PYTHON"], *command],
        cwd=REPOSITORY,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_values_and_gradients_are_those_of_float64(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = ["-m", "benchmarks.gpu", "--device", "cpu", "--small", "--only", "head", "--out", str(out)]
    run(*command, TRITON_INTERPRET="1")
    found: dict[str, Any] = json.loads(out.read_text())["checks"]["head"]
    assert found["failure"] is None
    compared = [name for name in found["figures"] if "apart from float64" in name]
    assert len(compared) == 8, "values and gradients, in fp32 and in bfloat16"


def test_kernels_and_torch_agree_on_a_bias_masked_logits_and_temperatures() -> None:
    run("-c", ODD_CASES, TRITON_INTERPRET="1")


def test_the_kernels_compile_for_an_h100() -> None:
    assert len(json.loads(run("-m", "tests.gpu.compiled"))) == 12


ODD_CASES = """
import sys
from tests.gpu.pair import SOURCES
sys.path[:0] = SOURCES
import torch
from atropos_trainer_grpo import logprobs as both

torch.manual_seed(0)
for temperature in (None, torch.linspace(0.5, 1.5, 9)):
    found = []
    for one_pass in (True, False):
        torch.manual_seed(1)
        hidden = (20 * torch.randn(9, 6)).requires_grad_()
        weight = torch.randn(4999, 6).requires_grad_()
        bias = torch.randn(4999)
        bias[:4500:3] = -torch.inf  # so that lanes see nothing else for a while, and some never
        bias.requires_grad_()
        targets = torch.randint(4500, 4999, (9,))
        if one_pass:
            scored = both.by_kernels(hidden, weight, bias, targets, temperature, 4)
        else:
            scored = both.by_torch(hidden, weight, bias, targets, temperature, 4, None, None, both.PLAIN, None, None)[:2]
        (scored[0] * torch.arange(9)).sum().add(scored[1].square().sum()).backward()
        weight.grad[torch.isinf(bias.detach())] = 0
        found.append([*(part.detach() for part in scored), hidden.grad, weight.grad, bias.grad])
        again = weight.grad.clone()
        lies = weight.grad.data_ptr()
        given = hidden, weight, bias, targets, temperature, 4
        (both.by_kernels(*given) if one_pass else both.by_torch(*given, None, None, both.PLAIN, None, None))[0].sum().backward()
        assert weight.grad.data_ptr() == lies, "a gradient that is there is added to where it lies"
        assert not torch.equal(weight.grad, again)
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
"""
