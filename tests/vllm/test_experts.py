"""A mixture of experts on a real vLLM, which loads each expert by its name in files, whatever the bridge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atropos_core.errors import FitError
from atropos_core.launch.memory_plan import workloads
from atropos_core.launch.model_checks import check_components
from tests.vllm.ends import connected, five_updates, plan_of
from tests.vllm.models import make_model

pytestmark = pytest.mark.timeout(400)

CHANGES = {"trainer": {"learning_rate": 5e-3, "old_logprobs": "recompute"}, "engine": {"enforce_eager": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "qwen3_moe", "qwen3_moe")


@pytest.mark.parametrize("bridge", ["delta", "nccl", "ipc"])
async def test_engine_and_trainer_agree_after_every_update_of_experts(bridge: str, model: Path, tmp_path: Path) -> None:
    async with connected(model, bridge, tmp_path, CHANGES) as ends:
        seen = await five_updates(ends, updates=2)
        print(f"{bridge}: differences {seen.difference}, probe {seen.probe_shift}, {seen.bytes_copied} bytes")
        assert np.max(seen.difference) <= 1e-4
        assert seen.probe_shift > 0.1


def test_adapters_of_experts_are_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    def check(devices: list[str], **lora: object) -> None:
        changes = {"trainer": {"use": "grpo", "lora": {"rank": 4, **lora}}, "engine": {"devices": devices}}
        plan = plan_of(model, "lora", changes)
        check_components(plan, workloads(plan, tmp_path))

    for targets in ("all-linear", ["q_proj", "down_proj"]):
        with pytest.raises(FitError, match=r"does not take adapters of experts") as refused:
            check(["cuda:0"], targets=targets)
        assert refused.value.remedy.startswith(
            """--set trainer.lora.targets='["k_proj", "o_proj", "q_proj", "v_proj"]'"""
        )
    check(["cuda:0"], targets=["k_proj", "o_proj"])
    with pytest.raises(FitError, match=r"does not run adapters of a mixture of experts on a CPU(.|\n)*--engine hf"):
        check(["cpu"], targets=["k_proj", "o_proj"])
