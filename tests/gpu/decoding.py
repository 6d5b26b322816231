"""Tokens per second of engine "hf" with and without CUDA graphs, and of transformers' `generate` and vLLM on the same prompts.

On a GPU each measurement has a new process: `python -m tests.gpu.decoding JSON`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.gpu.pair import SOURCES, Setting
from tests.gpu.report import Report
from tests.gpu.training import SHAPES, answer

WAYS = ("eager", "graphs", "generate", "vllm")
REPEAT = {"cpu": 1, "cuda": 3}  # timed, after one that is not


@dataclass(frozen=True)
class Decoding:
    """One measurement."""

    model: str  # directory
    device: str
    way: str = "eager"  # of WAYS
    dtype: str = "bfloat16"
    sequences: int = 64
    prompt: int = 128  # tokens
    reply: int = 256
    temperature: float = 1.0
    timed: bool = True  # False: only the tokens

    @property
    def repeat(self) -> int:
        return REPEAT[self.device.partition(":")[0]]


async def decoding(setting: Setting, report: Report) -> None:
    """Engine "hf" at 64 sequences on the shape of Qwen3-0.6B: graphs change no greedy token, a step waits for the device once, and tokens
    per second by each way."""
    from transformers import Qwen3Config

    from tests.gpu import models

    with tempfile.TemporaryDirectory() as folder:
        small, whole = Path(folder) / "small", Path(folder) / "whole"
        models.make(models.SMALL, "float32", "cpu", small)
        greedy = Decoding(
            str(small), setting.device, dtype="float32", sequences=8, prompt=20, reply=40, temperature=0.0, timed=False
        )
        made = [await _measured(replace(greedy, way=way)) for way in ("eager", "graphs")]
        report.holds("float32: the same greedy tokens with graphs", made[0]["tokens"] == made[1]["tokens"])
        report.at_least("float32: steps replayed", made[1]["replayed"], 20)
        config = SHAPES["small" if setting.small else "0.6B"] | {"max_position_embeddings": 1024}
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        models.make(Qwen3Config(**config | ends), "bfloat16", setting.device, whole)
        work = Decoding(str(whole), setting.device)
        if setting.small:
            work = replace(work, sequences=8, prompt=16, reply=24)
        rates: dict[str, float] = {}
        for way in WAYS:
            if way == "vllm" and (setting.device == "cpu" or importlib.util.find_spec("vllm") is None):
                report.note("vllm", "NOT RUN: this needs vLLM, and a GPU")
                continue
            found = await _measured(replace(work, way=way))
            rates[way] = found["tokens_s"]
            report.note(way, rates[way], "tokens/s")
            report.note(f"{way}, the first time", found["first_s"], "s")
            if "reserved_gib" in found:
                report.note(f"{way}, reserved", found["reserved_gib"], "GiB")
            if "waits" in found:
                report.at_most(f"{way}: times that a step waits for the device", found["waits"], 1)
        report.note("graphs over eager", rates["graphs"] / rates["eager"], "times")
        report.note("graphs over generate", rates["graphs"] / rates["generate"], "times")
        if "vllm" in rates:
            report.note("graphs over vllm (the goal is 0.5)", rates["graphs"] / rates["vllm"], "times")


async def _measured(work: Decoding) -> dict[str, Any]:
    if work.device == "cpu" and work.way != "generate":
        return await _engine(work)  # only a GPU's memory needs a new process, which takes seconds to import torch
    found: dict[str, Any] = await answer("tests.gpu.decoding", asdict(work))
    return found


def _prompts(work: Decoding) -> Any:
    return np.random.default_rng(5).integers(3, 600, (work.sequences, work.prompt)).astype(np.int32)


def _timed(work: Decoding, seconds: list[float]) -> dict[str, Any]:
    return {
        "tokens_s": work.sequences * work.reply / statistics.median(seconds[1:]),
        "first_s": seconds[0],
        "seconds": seconds,
    }


def _reserved(device: str) -> dict[str, float]:
    import torch

    return {} if device == "cpu" else {"reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30}


async def _engine(work: Decoding) -> dict[str, Any]:
    from atropos_core.types import Sampling
    from atropos_engine_hf.engine import HFEngine
    from tests.counted_device import Tape
    from tests.gpu.host import ENGINE

    graphs = work.way == "graphs"
    options: Any = SimpleNamespace(
        **ENGINE | {"dtype": work.dtype, "max_batch": work.sequences, "kv_cache_gb": 16.0, "cuda_graphs": graphs}
    )
    model = Path(work.model)
    context: Any = SimpleNamespace(
        directory=model, model=model, devices=(work.device,), threads=None, announced={}, transport=None
    )
    engine = HFEngine(options, context, Tape() if graphs and work.device == "cpu" else None)
    await engine.open()
    sampling = Sampling(work.reply, temperature=work.temperature)

    async def once() -> list[list[int]]:
        calls = (engine.sample(prompt, 1, sampling, [at], 600) for at, prompt in enumerate(_prompts(work)))
        return [one.tokens.tolist() for (one,) in await asyncio.gather(*calls)]

    batch = engine._policy.batch
    try:
        if not work.timed:
            made = await once()
            replayed = batch._graphs.replayed if batch._graphs is not None else 0
            return {"tokens": made, "replayed": replayed}
        seconds = []
        for _ in range(1 + work.repeat):
            start = time.perf_counter()
            await once()
            seconds.append(time.perf_counter() - start)
        found = _timed(work, seconds) | _reserved(work.device)
        if work.device != "cpu":
            found["waits"] = await _waits(batch, once)
        return found
    finally:
        await engine.close()


async def _waits(batch: Any, once: Any) -> int:
    """Return how often a step made the host wait for the device, at most, as torch sees it."""
    import torch

    step, most = batch.step, 0

    def counted(version: int) -> Any:
        nonlocal most
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            made = step(version)
        most = max(most, sum("synchronizing CUDA operation" in str(one.message) for one in seen))
        return made

    batch.step = counted
    torch.cuda.set_sync_debug_mode("warn")
    try:
        await once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not most:
        raise AssertionError("torch saw no wait at all: it does not count here")
    return most


def _generate(work: Decoding) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype)).to(work.device)
    ids = torch.from_numpy(_prompts(work).astype(np.int64)).to(work.device)
    seconds = []
    for _ in range(1 + work.repeat):
        start = time.perf_counter()
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=work.reply, do_sample=True, top_k=0, pad_token_id=0
        )
        made.cpu()
        seconds.append(time.perf_counter() - start)
        assert made.shape == (work.sequences, work.prompt + work.reply)
    return _timed(work, seconds) | _reserved(work.device)


def _vllm(work: Decoding) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=work.model, dtype=work.dtype, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=work.sequences,
        gpu_memory_utilization=0.4, enable_prefix_caching=False,
    )  # fmt: skip
    prompts: Any = [{"prompt_token_ids": row.tolist()} for row in _prompts(work)]
    sampling = SamplingParams(max_tokens=work.reply, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    seconds = []
    for _ in range(1 + work.repeat):
        start = time.perf_counter()
        made = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert sum(len(one.outputs[0].token_ids) for one in made) == work.sequences * work.reply
    return _timed(work, seconds)


def main() -> None:
    sys.path[:0] = SOURCES
    work = Decoding(**json.loads(sys.argv[1]))
    if work.way in ("eager", "graphs"):
        found = asyncio.run(_engine(work))
    else:
        found = _generate(work) if work.way == "generate" else _vllm(work)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
