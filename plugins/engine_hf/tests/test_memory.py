"""The engine's memory estimate, compared with the memory that it uses."""

from __future__ import annotations

import torch

from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.loading import load_model
from atropos_engine_hf.plugin import holds


def uses(directory, concurrent_rollouts, transport=None, **options):
    work = Workload(
        RunContext(directory, directory, transport=transport), 1, 1, 40, concurrent_rollouts, prompt_tokens=20
    )
    return {one.what: one for one in holds(HFOptions(**options), work)}


async def test_weights_and_cache_are_those_of_the_open_engine(engine, tiny):
    planned = uses(tiny, concurrent_rollouts=5)
    tensors = [*engine.model.parameters()]
    assert planned["parameters"].size_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    decoder = engine._batch._decoder
    assert planned["keys and values"].size_bytes == decoder.bytes_for(5, 60, kept=False)


def test_options_bound_the_memory_plan(tiny):
    assert uses(tiny, 100, kv_cache_gb=1e-5)["keys and values"].size_bytes == 10_000
    assert uses(tiny, 100, max_batch=5)["keys and values"] == uses(tiny, 5)["keys and values"]
    assert uses(tiny, 5, transport="posix_shm")["parameters"].shared == "weights"
    assert uses(tiny, 5, transport="checkpoint")["parameters"].shared == ""


def test_sixteen_bits_take_half(tiny):
    whole, half = uses(tiny, 5), uses(tiny, 5, dtype="bfloat16")
    assert half["parameters"].size_bytes * 2 == whole["parameters"].size_bytes
    model = load_model(tiny, "bfloat16", "cpu")
    assert half["parameters"].size_bytes == sum(
        2 * one.numel() for one in model.parameters() if one.dtype == torch.bfloat16
    )
