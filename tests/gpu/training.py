"""What updates cost: tokens per second and peak memory of trainer "grpo" alone, on a random model of a known shape.

`python -m tests.gpu.training JSON` is one measurement, in a process of its own. Two sequences make two micro-batches, in
bfloat16, with activations computed again: what prime-rl's own benchmark does. Beside it, where TRL is installed, the update of its
GRPOTrainer on two such sequences.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.gpu.pair import ROOT, SOURCES

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 151_936}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "small": _QWEN3
    | {
        "head_dim": 32, "num_key_value_heads": 2, "vocab_size": 640,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
}  # fmt: skip
SEQUENCES, WARM, STEPS = 2, 2, 3
LORA = SimpleNamespace(
    rank=16, alpha=32.0, dropout=0.0, targets="all-linear", layers=None, learning_rate=1e-5, quantization=None
)


@dataclass(frozen=True)
class Work:
    """One measurement."""

    shape: str
    lora: bool
    device: str
    tokens: int = 16_384  # of a sequence, and of a micro-batch
    offloading: bool = False  # layer inputs, masters and moments in host memory


@dataclass(frozen=True)
class Published:
    """What prime-rl's trainer does of the same work on one H100 (80 GB, HBM3), by its repository's own record."""

    tokens_s: float
    peak_gib: float
    source: str  # a file of benchmarks/baselines in PrimeIntellect-ai/prime-rl, at a commit


PUBLISHED = {
    ("0.6B", False): Published(
        12_327, 12.5, "benchmark-1xh100-Qwen--Qwen3-0.6B-rl-full-1gpu-Recompute-flash_attention_3-16384-cp1-ep1.json@aa1bec07"
    ),
    ("0.6B", True): Published(
        12_559, 5.2, "benchmark-8xh100-Qwen--Qwen3-0.6B-rl-16-1gpu-Recompute-flash_attention_3-16384-cp1-ep1.json@8dcafdd0"
    ),
    ("4B", True): Published(
        6_038, 23.9,
        "benchmark-8xh100-Qwen--Qwen3-4B-Instruct-2507-rl-16-1gpu-Recompute-flash_attention_3-16384-cp1-ep1.json@8dcafdd0",
    ),
}  # fmt: skip


class Options(SimpleNamespace):
    """The trainer's, where pydantic need not be installed."""

    def with_lora(self) -> Options:
        return self


async def measured(work: Work) -> dict[str, Any]:
    """In a process of its own. Raises RuntimeError with the end of its output where it fails."""
    return await _answer("tests.gpu.training", asdict(work))


async def measured_trl(work: Work) -> dict[str, Any]:
    """The update of TRL's GRPOTrainer, of sequences as long, one at a time: weights and both moments in bfloat16, where this trainer has
    masters and moments in float32."""
    from transformers import Qwen3Config

    from benchmarks.trainer_work import batch
    from tests.gpu import models

    with tempfile.TemporaryDirectory() as folder:
        model, shape = Path(folder) / "model", _shape(work)
        models.make(Qwen3Config(**shape), "bfloat16", work.device, model)
        for name in ("tokenizer.json", "tokenizer_config.json"):  # TRL opens one, and nothing is tokenised
            shutil.copy2(ROOT / "plugins/env_gsm8k/atropos_env_gsm8k/tiny" / name, model)
        files = []
        for step in range(WARM + STEPS):
            made = batch(np.full(1, 2), np.full(SEQUENCES, work.tokens - 2), shape["vocab_size"], seed=step)
            files.append(f"{folder}/{step}.npz")
            columns = {name: getattr(made, name) for name in ("offsets", "tokens", "sampled", "advantages")}
            np.savez(files[-1], **columns)
        found = await _answer(
            "benchmarks.trainer_trl",
            {
                "model": str(model), "batches": files, "together": 1, "group": SEQUENCES, "gradient_checkpointing": True,
                "threads": len(os.sched_getaffinity(0)), "device": work.device, "dtype": "bfloat16",
                "lora": LORA.rank if work.lora else 0,
            },
        )  # fmt: skip
    return {
        "tokens_s": SEQUENCES * work.tokens / statistics.median(found["seconds"][WARM:]),
        "allocated_gib": found.get("allocated", found["highest"]) / 2**30,
    }


async def _answer(module: str, given: dict[str, Any]) -> dict[str, Any]:
    paths = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, json.dumps(given),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, answer = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(
            f"the measurement ended with {process.returncode}: {answer.decode(errors='replace')[-2000:]}"
        )
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def _shape(work: Work) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return SHAPES[work.shape] | ends | {"max_position_embeddings": work.tokens}


async def _measure(work: Work, directory: Path) -> dict[str, Any]:
    import torch
    from transformers import Qwen3Config

    from atropos_trainer_grpo.trainer import GrpoTrainer
    from benchmarks import resident
    from benchmarks.trainer_work import batch
    from tests.gpu import models
    from tests.gpu.host import TRAINER

    shape = _shape(work)
    size = models.make(Qwen3Config(**shape), "bfloat16", work.device, directory / "model") // 2
    on_gpu = work.device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(work.device)
    else:
        resident.settle()
    options: Any = Options(
        **TRAINER | {
            "dtype": "bfloat16", "gradient_checkpointing": True, "tokens_per_microbatch": work.tokens,
            "old_logprobs": "recompute", "learning_rate": 1e-6, "lora": LORA if work.lora else None,
            "activation_offloading": work.offloading, "optimizer_offloading": work.offloading,
        }
    )  # fmt: skip
    context: Any = SimpleNamespace(
        directory=directory, model=directory / "model", seed=0, deterministic=False, transport="checkpoint",
        transports=("checkpoint",), devices=(work.device,), threads=None, announced={}, steps=WARM + STEPS, max_staleness=0,
    )  # fmt: skip

    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        yield

    trainer = GrpoTrainer(options, context)
    await trainer.open()
    seconds, norms = [], []
    for step in range(WARM + STEPS):
        prompts, replies = np.full(SEQUENCES, 2), np.full(SEQUENCES, work.tokens - 2)
        made = batch(prompts, replies, shape["vocab_size"], seed=step)
        began = time.perf_counter()
        metrics = await trainer.step(made, writing)  # its metrics wait for the device
        seconds.append(time.perf_counter() - began)
        norms.append(metrics["grad_norm"])
    await trainer.close()
    memory = (
        {
            "allocated_gib": torch.cuda.max_memory_allocated(work.device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(work.device) / 2**30,
        }
        if on_gpu
        else {"resident_gib": resident.highest() / 2**30}
    )
    tokens_s = SEQUENCES * work.tokens / statistics.median(seconds[WARM:])
    return {"parameters": size, "tokens_s": tokens_s, "gradient_norms": norms, **memory}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(Work(**json.loads(sys.argv[1])), Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
