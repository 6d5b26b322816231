"""Families of models beyond Llama and Qwen on a real vLLM: what it samples is what the trainer computes, after every update.

benchmarks/models_vllm.py measures all families; these are one or two of each kind of layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atropos_core.types import Sampling
from tests.vllm.ends import connected, five_updates
from tests.vllm.models import make_family

pytestmark = pytest.mark.timeout(400)

CHANGES = {"trainer": {"learning_rate": 3e-3, "old_logprobs": "recompute"}, "engine": {"enforce_eager": True}}
SAMPLING = Sampling(
    max_tokens=40, temperature=2.0
)  # longer than two windows, and for random weights that are sure of their tokens
EXACT = 1e-4  # nats
FAMILIES = {
    "gemma3_text": "checkpoint",  # windows
    "phi3": "delta",  # windows, and fused matrices in files
    "glm4": "checkpoint",
    "granite": "delta",  # scaled logits
    "mixtral": "checkpoint",  # experts
    "falcon_h1": "delta",  # a state next to attention
    "granitemoehybrid": "checkpoint",  # layers with states, and experts
}


@pytest.mark.parametrize(("name", "bridge"), FAMILIES.items())
async def test_engine_and_trainer_agree_after_every_update(name: str, bridge: str, tmp_path: Path) -> None:
    make_family(tmp_path / name, name)
    async with connected(tmp_path / name, bridge, tmp_path, CHANGES) as ends:
        seen = await five_updates(ends, SAMPLING, updates=2)
        print(f"{name} over {bridge}: differences {seen.difference}, probe {seen.probe_shift}")
        assert np.max(seen.difference) <= EXACT
        assert seen.probe_shift > 0.01
