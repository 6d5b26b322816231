"""What updates cost: tokens per second and peak memory of trainer "grpo" alone, on a random model of a known shape.

`python -m tests.gpu.training JSON` is one measurement, in a process of its own. Two sequences make two micro-batches, in
bfloat16, with activations computed again: what prime-rl's own benchmark does. Beside it, where TRL is installed, the update of its
GRPOTrainer on two such sequences.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from atropos_core.types import Batch
from tests.gpu.flops import counts_of, product_flops_s, update_flops
from tests.gpu.pair import ROOT, SOURCES

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": 151_936}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": _QWEN3
    | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "small": _QWEN3
    | {
        "head_dim": 32, "num_key_value_heads": 2, "vocab_size": 640,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
}  # fmt: skip
GROUP = 8
SHARED = 0.75  # of the tokens of branches
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
    sequences: int = 2
    groups: int = 0  # in place of the sequences: of eight replies to a prompt; `tokens` is the most that one has
    branches: int = 0  # in place of the sequences: that share three quarters of their tokens, and are one micro-batch
    share_prompts: bool = True
    attention: str = "auto"
    kernels: str = "torch"
    compiled: bool = False  # the decoder layers, by torch.compile
    offloading: bool = False  # layer inputs in host memory, and of a whole model masters and moments
    expandable: bool = False  # segments of the allocator
    quantization: str | None = None  # of a base beside an adapter
    warm: int = 2
    steps: int = 3


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

    def adapts(self, transports: object) -> bool:
        return self.lora is not None

    def with_lora(self) -> Options:
        return self


async def measured(work: Work) -> dict[str, Any]:
    """In a process of its own."""
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if work.expandable else {}
    found: dict[str, Any] = await answer("tests.gpu.training", asdict(work), segments)
    return found


async def measured_trl(work: Work, unsloth: bool = False) -> dict[str, Any]:
    """The update of TRL's GRPOTrainer on the same batches, or of Unsloth's: weights and both moments in bfloat16, where this trainer has
    masters and moments in float32. Sequences go through the model one at a time, and those of groups eight at a time, padded. Padding is
    not counted."""
    from transformers import Qwen3Config

    from tests.gpu import models

    with tempfile.TemporaryDirectory() as folder:
        model, shape = Path(folder) / "model", _shape(work)
        models.make(Qwen3Config(**shape), "bfloat16", work.device, model)
        for name in ("tokenizer.json", "tokenizer_config.json"):  # TRL opens one, and nothing is tokenised
            shutil.copy2(ROOT / "plugins/env_gsm8k/atropos_env_gsm8k/tiny" / name, model)
        files, counts = [], []
        for step in range(work.warm + work.steps):
            made = _batch(work, shape["vocab_size"], step)
            files.append(f"{folder}/{step}.npz")
            counts.append(len(made.tokens))
            columns = {name: getattr(made, name) for name in ("offsets", "tokens", "sampled", "advantages")}
            np.savez(files[-1], **columns)
        together, group = (GROUP, GROUP) if work.groups else (1, work.sequences)
        library = {"longest": work.tokens, "in_4_bits": work.quantization == "nf4"} if unsloth else None
        found = await answer(
            "benchmarks.trainer_trl",
            {
                "model": str(model), "batches": files, "together": together, "group": group, "gradient_checkpointing": True,
                "threads": len(os.sched_getaffinity(0)), "device": work.device, "dtype": "bfloat16",
                "lora": LORA.rank if work.lora else 0, "unsloth": library,
            },
        )  # fmt: skip
    return {
        "tokens_s": _rate(counts, found["seconds"], work),
        "allocated_gib": found.get("allocated", found["highest"]) / 2**30,
    }


def _rate(counts: list[int], seconds: list[float], work: Work) -> float:
    """The median of counts per second, over the updates that are timed."""
    return statistics.median(
        count / took for count, took in zip(counts[work.warm :], seconds[work.warm :], strict=True)
    )


async def answer(module: str, given: Any, variables: Mapping[str, str] | None = None) -> Any:
    """What `python -m module GIVEN` prints last, both as JSON. Raises RuntimeError with the end of its output where it fails."""
    paths = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, json.dumps(given),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **(variables or {})},
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
    return json.loads(out.splitlines()[-1])


def _shape(work: Work) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return SHAPES[work.shape] | ends | {"max_position_embeddings": work.tokens}


def _batch(work: Work, vocabulary: int, seed: int) -> Batch:
    from benchmarks import trainer_work

    if work.groups:
        replies = np.random.default_rng(seed).integers(work.tokens // 8, 3 * work.tokens // 4, GROUP * work.groups)
        return trainer_work.batch(np.full(work.groups, work.tokens // 4), replies, vocabulary, seed=seed)
    if work.branches:
        return trainer_work.branches(1, work.branches, vocabulary, length=work.tokens, shared=SHARED)
    prompts, replies = np.full(work.sequences, 2), np.full(work.sequences, work.tokens - 2)
    return trainer_work.batch(prompts, replies, vocabulary, seed=seed)


def _options(work: Work) -> dict[str, Any]:
    """What differs from the checks' own."""
    packed = work.tokens * (8 if work.groups else 1)
    if work.branches:  # as many tokens as they are once shared, whether they are shared or not
        packed = int(work.tokens * (SHARED + work.branches * (1 - SHARED)))
    return {
        "dtype": "bfloat16", "gradient_checkpointing": True, "tokens_per_microbatch": packed, "old_logprobs": "recompute",
        "learning_rate": 1e-6, "attention": work.attention, "kernels": work.kernels,
        "compile_layers": work.compiled, "share_prompts": work.share_prompts,
        "activation_offloading": work.offloading, "optimizer_offloading": work.offloading and not work.lora,
    }  # fmt: skip


def predicted(work: Work, model: Path) -> dict[str, float]:
    """GiB of tensors by the memory plan, on the device. Needs pydantic."""
    from atropos_core.launch.memory_plan import peak
    from atropos_core.plugins.model_provider import CONTEXT, Workload
    from atropos_core.plugins.provider import RunContext
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.memory import holds

    context = RunContext(model.parent, model, 1, transport="checkpoint", devices=(work.device,))
    lora = {"rank": LORA.rank, "quantization": work.quantization} if work.lora else None
    options = GrpoOptions.model_validate(_options(work) | {"lora": lora})
    at_most = peak(list(holds(options, Workload(context, work.sequences, 1, work.tokens - 2, 0, 2))))
    on_device = [one.size_bytes for one in at_most if one.device == work.device and one.what != CONTEXT]
    return {"predicted_gib": sum(on_device) / 2**30}


def make_model(work: Work, directory: Path) -> int:
    """Its number of parameters."""
    from transformers import Qwen3Config

    from tests.gpu import models

    change = None
    if work.quantization is not None:
        from atropos_trainer_grpo.quantization import rounded as change
    return models.make(Qwen3Config(**_shape(work)), "bfloat16", work.device, directory, change) // 2


async def _measure(work: Work, directory: Path) -> dict[str, Any]:
    import torch

    from atropos_trainer_grpo.trainer import GrpoTrainer
    from benchmarks import resident
    from tests.gpu.host import TRAINER

    model = directory / "model"
    size = make_model(work, model)
    plan = (
        predicted(work, model)
        if importlib.util.find_spec("pydantic") is not None and not (work.branches or work.groups)
        else {}
    )
    on_gpu = work.device != "cpu"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(work.device)
    else:
        resident.settle()
    lora = SimpleNamespace(**vars(LORA) | {"quantization": work.quantization}) if work.lora else None
    options: Any = Options(**TRAINER | _options(work) | {"lora": lora})
    updates = work.warm + work.steps
    context: Any = SimpleNamespace(
        directory=directory, model=model, seed=0, deterministic=False, transport="checkpoint", transports=("checkpoint",),
        devices=(work.device,), threads=None, announced={}, steps=updates, max_staleness=0,
    )  # fmt: skip

    @asynccontextmanager
    async def writing() -> AsyncIterator[None]:
        yield

    trainer = GrpoTrainer(options, context)
    await trainer.open()
    seconds, norms, counts, flops = [], [], [], []
    for step in range(updates):
        made = _batch(work, SHAPES[work.shape]["vocab_size"], step)
        counts.append(len(made.tokens))
        through = counts_of(made, share=work.share_prompts)
        flops.append(update_flops(SHAPES[work.shape], through, LORA.rank if work.lora else 0))
        began = time.perf_counter()
        metrics = await trainer.step(made, writing)  # its metrics wait for the device
        seconds.append(time.perf_counter() - began)
        norms.append(metrics["grad_norm"])
    if on_gpu:
        memory = {
            "allocated_gib": torch.cuda.max_memory_allocated(work.device) / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved(work.device) / 2**30,
        }
        free, total = torch.cuda.mem_get_info(work.device)
        memory["beside_gib"] = (total - free - torch.cuda.memory_reserved(work.device)) / 2**30
    else:
        memory = {"resident_gib": resident.highest() / 2**30}
    await trainer.close()
    model_flops_s = _rate(flops, seconds, work)
    return {
        "parameters": size,
        "tokens_s": _rate(counts, seconds, work),
        "model_flops_s": model_flops_s,
        "utilization": model_flops_s / product_flops_s(work.device),
        "seconds": seconds,
        "gradient_norms": norms,
        **memory,
        **plan,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(Work(**json.loads(sys.argv[1])), Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
