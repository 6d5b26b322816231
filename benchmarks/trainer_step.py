"""Update steps of GrpoTrainer in a process of their own; benchmarks/trainer.py starts it.

Argument: a JSON object with model, batches (files of numpy, one for each step), options of the trainer, threads, and whether to
hold all logits at once (whole_logits) and to measure attention alone on the shape of the last batch (attention). Prints one
line of JSON: seconds and CPU seconds of each step, bytes resident before the first and at most, CPU seconds of attention.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from atropos_core.plugins.provider import RunContext
from atropos_core.types import Batch
from atropos_trainer_grpo import chunks
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer
from benchmarks import resident


@asynccontextmanager
async def writing() -> AsyncIterator[None]:
    yield


def load(file: str) -> Batch:
    with np.load(file) as columns:
        return Batch(**{name: columns[name] for name in columns.files}, version=1)


async def run(given: dict[str, Any], directory: Path) -> dict[str, Any]:
    if given["whole_logits"]:
        chunks.LOGITS = (1 << 62, 1 << 62)
    context = RunContext(directory, Path(given["model"]), transport="checkpoint", threads=given["threads"])
    trainer = GrpoTrainer(GrpoOptions(**given["options"]), context)
    await trainer.open()
    batches = [load(file) for file in given["batches"]]
    for parameter in trainer.model.parameters():
        parameter.data.add_(0)  # a mapped file is resident once it is touched
    loaded = resident.settle()
    seconds, busy = [], []
    for batch in batches:
        began, worked = time.perf_counter(), time.process_time()
        await trainer.step(batch, writing)
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    highest = resident.highest()
    model: Any = trainer.model
    attention = attended(model.config, batches[-1]) if given["attention"] else 0.0
    await trainer.close()
    return {"seconds": seconds, "busy": busy, "loaded": loaded, "highest": highest, "attention": attention}


def attended(config: Any, batch: Batch) -> float:
    """CPU seconds of causal attention alone, forward and backward, through all layers. Sequences are of one length."""
    sequences, length = batch.sequences, int(batch.lengths[0])

    def states(heads: int) -> torch.Tensor:
        return torch.randn(sequences, length, heads, config.head_dim).transpose(1, 2).requires_grad_()

    query, key, value = (states(n) for n in (config.num_attention_heads, *2 * [config.num_key_value_heads]))
    seconds = []
    for _ in range(4):
        began = time.process_time()
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        mixed.backward(torch.ones_like(mixed))
        seconds.append(time.process_time() - began)
    return statistics.median(seconds[1:]) * int(config.num_hidden_layers)  # the first is to warm up


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(run(json.loads(sys.argv[1]), Path(directory)))))


if __name__ == "__main__":
    main()
