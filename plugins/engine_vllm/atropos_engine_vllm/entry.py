"""Loaded by vLLM in each of its processes (entry point group `vllm.general_plugins`). It does nothing unless a server of
ours says so by its environment."""

from __future__ import annotations

import os

from atropos_engine_vllm.orphan import GUARD_VARIABLE, watch_parent


def enter() -> None:
    """Called by vLLM before it loads a model, perhaps several times."""
    if GUARD_VARIABLE not in os.environ:
        return
    from atropos_torch_models.cpu_warmup import warm_up

    watch_parent()
    warm_up()
