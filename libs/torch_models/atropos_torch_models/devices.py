"""Check that torch has a component's device."""

from __future__ import annotations

import torch

from atropos_core.errors import FitError


def refuse_missing(device: str, whose: str) -> None:
    """Raises FitError for a device that is missing. `whose`: "trainer 'grpo'"; its first word is its section."""
    if device == "cpu":
        return
    remedy = f'Set {whose.split()[0]}.devices = ["cpu"], or to a device that is there.'
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise FitError(f"{whose} is to run on {device!r}, and torch finds no CUDA device.", remedy=remedy)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FitError(
            f"{whose} is to run on {device!r}, which torch does not have: {reason:.200}", remedy=remedy
        ) from error
