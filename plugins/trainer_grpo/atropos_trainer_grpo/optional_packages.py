"""Packages that only some of the options need."""

from __future__ import annotations

import importlib.util

from atropos_core.errors import FitError

EXTRAS = {"peft": "lora", "torchao": "torchao", "bitsandbytes": "bitsandbytes", "liger_kernel": "liger"}


def require(module: str, what: str) -> None:
    """Raises FitError if the module is not installed: `what` needs it, and how to install it."""
    if importlib.util.find_spec(module) is None:
        raise FitError(
            f"{what} needs the module {module!r}, and {module!r} is not installed.",
            remedy=f"pip install 'atropos-plugin-trainer-grpo[{EXTRAS[module]}]'",
        )
