"""The entry point in vLLM's group of general plugins. It does nothing unless an Atropos run requests it."""

from __future__ import annotations

import os

from atropos_core.errors import FitError

NAME = "atropos_nccl"  # of the weight-transfer backend


def register() -> None:
    """Called by vLLM in each of its processes, perhaps several times. Raises FitError, which ends the server, if this vLLM's weight
    transfer differs."""
    if os.environ.get("ATROPOS_WEIGHT_TRANSFER") != NAME:
        return
    try:
        from vllm.distributed.weight_transfer import factory, nccl_engine

        known, _ = factory.WeightTransferEngineFactory, nccl_engine.NCCLWeightTransferEngine
    except (ImportError, AttributeError) as error:
        raise FitError(
            f"this vLLM has no weight transfer that bridge 'nccl' knows: {error}", remedy="Use --bridge checkpoint."
        ) from error
    if NAME not in known._registry:
        known.register_engine(NAME, "atropos_bridge_nccl.vllm.worker", "Receiver")
