"""One version's update and sampling, on request; benchmarks/versions.py starts it with the Python of that version.

It imports nothing of `benchmarks`, since the other version's modules may differ. Each line of stdin ("open", "update", "sample") gets a
line of JSON: the CPU seconds that it took, or why this version refuses the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atropos_core.errors import AtroposError
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Batch, Sampling
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer

NEW_TOKENS, PROMPT_TOKENS = 32, 35


@asynccontextmanager
async def writing() -> AsyncIterator[None]:
    yield


async def serve(given: dict[str, Any], folder: Path) -> None:
    context = RunContext(folder, Path(given["model"]), transport="checkpoint", threads=1)
    trainer = GrpoTrainer(GrpoOptions(), context)
    engine = HFEngine(HFOptions(max_batch=512), RunContext(folder, Path(given["model"]), threads=1))
    with np.load(given["batch"]) as columns:
        batch = Batch(**{name: columns[name] for name in columns.files}, version=1)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, given["vocabulary"], PROMPT_TOKENS).astype(np.int32) for _ in range(given["prompts"])]

    async def update() -> None:
        await trainer.step(batch, writing)

    async def sample() -> None:
        sampling = Sampling(max_tokens=NEW_TOKENS)
        seeds = range(given["group"])
        made = await asyncio.gather(
            *(engine.sample(prompt, given["group"], sampling, seeds, 600) for prompt in prompts)
        )
        assert (
            sum(len(reply.tokens) for replies in made for reply in replies)
            == len(prompts) * given["group"] * NEW_TOKENS
        )

    async def open_both() -> None:
        await trainer.open()
        await engine.open()

    calls = {"open": open_both, "update": update, "sample": sample}
    for line in sys.stdin:
        began = time.process_time()
        try:
            await calls[line.strip()]()
            answer: dict[str, Any] = {"seconds": time.process_time() - began}
        except (
            AtroposError,
            RuntimeError,
        ) as error:  # some versions find out only in an update that they cannot compute a model
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(json.loads(sys.argv[1]), Path(folder)))
