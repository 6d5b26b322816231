"""Warm up torch on a CPU: a process calls `warm_up()` before it computes, so that its first numbers are right.

torch leaves `cos`, `exp`, `log` and others to oneMKL, which chooses the code of each function at its first call. If two threads
make that call at once, one of them may get low-accuracy code for that call. Half of a rotary table is then off by 1.5e-4, and
logprobs by 1.1e-3 nats. This happens with oneMKL 2024.2, which torch 2.13 is built with
(https://github.com/pytorch/pytorch/issues/188792); `python -m benchmarks.first_calls` reproduces it.
"""

from __future__ import annotations

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "exp", "expm1", "log", "log10", "log1p", "log2", "sin", "sqrt", "tan", "tanh",
)  # fmt: skip # those that torch's ATen/cpu/vml.h gives to oneMKL


def warm_up() -> None:
    """Call each function once with a single element, so that only one thread makes the first call."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
