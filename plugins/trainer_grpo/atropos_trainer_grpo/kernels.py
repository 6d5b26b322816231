"""liger-kernel's Triton kernels in place of a model's own norms, rotary embedding and gated MLP."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from atropos_core.errors import FitError


def use_liger(model: PreTrainedModel) -> None:
    """Use the kernels in this model, and in every model of its architecture that this process opens later. The head does
    not change: chunks.py and logprobs.py compute it. Raises FitError if liger-kernel does not know the architecture."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    apply = KNOWN.get(model.config.model_type)
    if apply is None:
        raise FitError(
            f'trainer.kernels = "liger": liger-kernel has none for {model.config.model_type!r}.',
            remedy='Set trainer.kernels = "torch".',
        )
    takes = inspect.signature(apply).parameters
    head = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in takes}
    apply(model=model, **head)
