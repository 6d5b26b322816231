"""The engine's memory estimate, compared with the memory that it uses."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig

from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_engine_hf.cohort import CohortDecoder
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.loading import load_model
from atropos_engine_hf.plugin import holds, sizes
from atropos_torch_models.small_model import small_model


def uses(directory, concurrent_rollouts, transport=None, **options):
    work = Workload(
        RunContext(directory, directory, transport=transport), 1, 1, 40, concurrent_rollouts, prompt_tokens=20
    )
    return {one.what: one for one in holds(HFOptions(**options), work)}


async def test_weights_and_cache_are_those_of_the_open_engine(engine, tiny):
    planned = uses(tiny, concurrent_rollouts=5)
    tensors = [*engine.model.parameters()]
    assert planned["parameters"].size_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    decoder = engine._policy.batch._decoder
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


def offered(directory, rollouts, *free, device="cpu", **options):
    work = Workload(RunContext(directory, directory, devices=(device,)), 1, 1, 40, rollouts, prompt_tokens=20)
    return sizes(HFOptions(**options), work, free)


def test_sizes_begin_with_the_defaults_and_take_less_and_less(tiny):
    names = ("kv_cache_gb", "max_batch", "prefill_tokens")
    usual = HFOptions()
    found = offered(tiny, 256, *names)
    assert found[0].values == {name: getattr(usual, name) for name in names} and found[0].slower == 0
    assert [one.slower for one in found] == sorted(one.slower for one in found)
    totals = [
        sum(one.size_bytes for one in uses(tiny, 256, **choice.values).values() if one.what != "parameters")
        for choice in found
    ]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


def test_only_free_options_are_offered_and_a_gpu_has_room_for_all_rollouts(tiny):
    assert all(one.values.keys() == {"max_batch"} for one in offered(tiny, 256, "max_batch", kv_cache_gb=1.0))
    assert [dict(one.values) for one in offered(tiny, 256)] == [{}]
    row = uses(tiny, 1)["keys and values"].size_bytes
    many = int(20e9 / row)
    first = offered(tiny, many, "kv_cache_gb", device="cuda:0", max_batch=many)[0].values["kv_cache_gb"]
    assert 19 <= first <= 21


async def test_rows_in_the_models_own_cache_are_planned_with_their_states_and_windows(
    open_engine, write_tokenizer, tmp_path
):
    config = AutoConfig.for_model("gemma3_text")
    small_model(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    planned = uses(tmp_path, concurrent_rollouts=5)["keys and values"].size_bytes
    engine = await open_engine(tmp_path)
    decoder = engine._policy.batch._decoder
    assert isinstance(decoder, CohortDecoder) and planned == decoder.bytes_for(5, 60, kept=False)
    decoder.prefill([np.arange(60)], [5], 0)
    decoder.decode(np.zeros(5, np.int64), np.full(5, 60))  # a prompt's window is cut to its size by the next step
    assert decoder.bytes_for(0, 0, kept=True) <= decoder.bytes_for(5, 61, kept=False) * 1.1
