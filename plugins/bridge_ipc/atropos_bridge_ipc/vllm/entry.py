"""The entry point in vLLM's group of general plugins. It does nothing unless an Atropos run requests it."""

from __future__ import annotations

import os

NAME = "atropos_ipc"  # of the weight-transfer backend
TRANSFER_VARIABLE = "ATROPOS_WEIGHT_TRANSFER"  # the environment variable that holds the name

_registered = False


def register() -> None:
    """Called by vLLM in each of its processes. Raises FitError, which ends the server, for a vLLM that lacks a name
    that we need."""
    global _registered
    if os.environ.get(TRANSFER_VARIABLE) != NAME or _registered:
        return
    from atropos_bridge_ipc.vllm import names

    found = names.find()
    if found.platform.is_cpu():
        # Otherwise linear layers on a CPU are packed for the processor after loading and their weights thrown away.
        found.linear_base._cpu_skip_gemm_dispatch = True
    found.factory.register_engine(NAME, "atropos_bridge_ipc.vllm.worker", "SharedWeights")
    _registered = True
