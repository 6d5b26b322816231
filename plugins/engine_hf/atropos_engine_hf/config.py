"""The options of `[engine] use = "hf"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.options import Options


class HFOptions(Options):
    """Options of the engine "hf". Devices and threads are the run's: `engine.devices`, `engine.threads`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description='precision of the weights; "auto" is float32 on a CPU and the checkpoint\'s own elsewhere'
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None,
        description="hold the base of a run's adapters in 4 or 8 bits; round it first with `atropos quantize`",
    )
    decode: Literal["auto", "slots", "cohort"] = Field(
        "auto",
        description="what rows are decoded in: slots of a cache of all keys and values, or caches of the model's own, for other "
        'kinds of layers; "auto" is the first that is exact for the model',
    )
    cuda_graphs: bool = Field(
        False,
        description="record decode steps as CUDA graphs, and replay them; for slots on a GPU. Off, because it has not run on one yet",
    )
    max_batch: int = Field(256, ge=1, description="rows that are decoded together; more wait in arrival order")
    prefill_tokens: int = Field(
        4096, ge=1, description="padded prompt tokens in one forward pass of prefill or rescoring"
    )
    kv_cache_gb: float = Field(8.0, gt=0, description="gigabytes (10⁹ bytes) for keys and values; more rows wait")
    adapters_gb: float = Field(
        1.0,
        gt=0,
        description="gigabytes (10⁹ bytes) for the weights of named adapters",
    )
