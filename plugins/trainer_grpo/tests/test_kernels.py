"""liger-kernel's kernels: which models get them. (The kernels themselves need a CUDA device.)"""

import sys
from types import ModuleType

import pytest

from atropos_core.errors import FitError
from atropos_trainer_grpo.kernels import use_liger
from atropos_trainer_grpo.model import open_model


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for the part of liger-kernel that use_liger needs: a function for each architecture that it knows.
    Only a CUDA machine has the real one."""
    applied = []

    def apply(model, cross_entropy=True, rms_norm=True):
        applied.append({"model": model, "cross_entropy": cross_entropy, "rms_norm": rms_norm})

    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}
    return applied


def test_liger_replaces_kernels_of_what_it_knows_but_the_head_and_refuses_the_rest(liger, model_of):
    known, other = [
        open_model(model_of(kind), dtype="auto", device="cpu", with_weights=True) for kind in ("qwen3", "llama")
    ]
    use_liger(known)
    assert liger == [{"model": known, "cross_entropy": False, "rms_norm": True}]
    with pytest.raises(FitError, match="liger-kernel has none for 'llama'") as refused:
        use_liger(other)
    assert refused.value.remedy == 'Set trainer.kernels = "torch".'
    assert len(liger) == 1
