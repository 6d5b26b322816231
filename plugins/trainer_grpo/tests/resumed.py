"""A trainer that another process makes and resumes from a checkpoint."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from atropos_core.codec import encode_bytes
from atropos_core.types import Batch

PROGRAM = """
import asyncio, json, sys
from contextlib import asynccontextmanager
from pathlib import Path
import torch
from atropos_core.codec import decode
from atropos_core.plugins.provider import RunContext
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer

model, checkpoint, batches, options, context, out = sys.argv[1:]

@asynccontextmanager
async def writing():
    yield

async def main():
    trainer = GrpoTrainer(
        GrpoOptions(**json.loads(options)), RunContext(Path(out).parent, Path(model), threads=1, **json.loads(context))
    )
    await trainer.open()
    await trainer.restore(Path(checkpoint))
    for batch in decode(Path(batches).read_bytes()):
        await trainer.step(batch, writing)
    torch.save(trainer.model.state_dict(), out)

asyncio.run(main())
"""


async def trained_on(
    model: Path, checkpoint: Path, later: Sequence[Batch], options: Mapping[str, Any], **context: Any
) -> dict[str, torch.Tensor]:
    """The weights that the process has after these batches."""
    (batches := checkpoint / "later").write_bytes(encode_bytes(list(later)))
    arguments = [model, checkpoint, batches, json.dumps(options), json.dumps(context), checkpoint / "resumed.pt"]
    await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "tests.warm.program", PROGRAM, *map(str, arguments)], check=True
    )
    weights: dict[str, torch.Tensor] = torch.load(checkpoint / "resumed.pt")
    return weights


def optimizer_state(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's optimizer state. If several ranks wrote it, torch's own reader puts the parts together."""
    state: dict[str, Any] = torch.load(directory / "trainer_state.pt", weights_only=True)["optimizer"]
    if not (folder := directory / "trainer_state").exists():
        return state
    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(tuple(said.size), dtype=said.properties.dtype) for name, said in index.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    whole = lambda value: tensors[value] if isinstance(value, str) else value  # noqa: E731
    moments = {at: {kind: whole(value) for kind, value in entry.items()} for at, entry in state["moments"].items()}
    return {**state, "masters": [whole(master) for master in state["masters"]], "moments": moments}


def assert_same_bits(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    here = model.state_dict()
    assert here.keys() == weights.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, weights[name]), name
