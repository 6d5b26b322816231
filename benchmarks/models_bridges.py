"""Measures for each family of causal language models if weights travel over bridges, and if training continues from a checkpoint:
python -m benchmarks.models_bridges [FAMILY ...]

Engine `hf` and trainer `grpo` in one process, with the small copy of a family in float32. Twice the engine samples, the trainer makes an
update, and the bridge publishes it. Then the engine samples again, and its logprobs are compared with the trainer's, in nats. For
`resume`, a new trainer loads what the first wrote before its second update, and makes that update again. Writes the part "bridges" of
benchmarks/results/models.json.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from atropos_bridge_checkpoint.bridge import CheckpointBridge
from atropos_bridge_checkpoint.config import CheckpointBridgeOptions
from atropos_bridge_delta.bridge import DeltaBridge
from atropos_bridge_delta.config import DeltaBridgeOptions
from atropos_bridge_lora.bridge import LoraBridge
from atropos_bridge_lora.config import LoraBridgeOptions
from atropos_core import console
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import AtroposError
from atropos_core.interfaces import Transport
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.types import Batch, Sampling
from atropos_engine_hf.config import HFOptions
from atropos_engine_hf.engine import HFEngine
from atropos_torch_models.small_model import small_model
from atropos_trainer_grpo.config import GrpoOptions
from atropos_trainer_grpo.trainer import GrpoTrainer
from benchmarks.machine import RESULTS
from tests.models.conftest import TOKENIZER
from tests.models.families import FAMILIES, config_of
from tests.vllm.ends import Ends

BRIDGES: dict[str, tuple[Transport, Any]] = {
    "checkpoint": ("checkpoint", lambda context: CheckpointBridge(CheckpointBridgeOptions(), context)),
    "delta": ("checkpoint", lambda context: DeltaBridge(DeltaBridgeOptions(), context)),
    "lora": ("adapter", lambda context: LoraBridge(LoraBridgeOptions(), context)),
}
SAMPLING = Sampling(
    max_tokens=24, temperature=6.0
)  # some copies are so sure of a token that all replies would be the same
UPDATES, PROMPTS, DEADLINE_S = 2, 2, 120.0


def options(bridge: str) -> GrpoOptions:
    given: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": 10.0}
    return GrpoOptions(**given, **({"lora": {"rank": 4, "learning_rate": 1e-2}} if bridge == "lora" else {}))


async def over(bridge: str, model: Path, folder: Path) -> dict[str, float | bool]:
    """The largest difference in nats after the updates, how far these have moved the policy, and if training resumed to the same bits."""
    transport, make = BRIDGES[bridge]
    announced = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["all-linear"]}}
    context = RunContext(folder, model, transport=transport, threads=1, announced=announced)
    engine, trainer = HFEngine(HFOptions(), context), GrpoTrainer(options(bridge), context)
    made = make(context)
    again = GrpoTrainer(options(bridge), context)
    try:
        engine.endpoint, trainer.endpoint = LocalEndpoint(engine), LocalEndpoint(trainer)
        info, _ = await trainer.open(), await engine.open()
        for part, endpoint in (("trainer", trainer.endpoint), ("engine", engine.endpoint)):
            if part in (extensions := made.extensions()):
                await endpoint.load_extension(extensions[part])
        await made.connect(trainer.endpoint, [engine])
        draw = np.random.default_rng(3)
        prompts = [
            draw.integers(3, info.vocabulary - 3, size=20 + 30 * at).astype(np.int32) for at in range(PROMPTS)
        ]  # shorter and longer than the copy's windows
        parts: Any = SimpleNamespace(engine=engine, trainer=trainer, bridge=made)
        ends = Ends(None, parts, info, prompts)  # type: ignore[arg-type] # no plan: nothing is started here
        probe = [draw.integers(3, info.vocabulary - 3, size=60).astype(np.int32)]
        before = await trainer.logprobs(probe)
        batch: Batch | None = None
        for number in range(UPDATES):
            if number == UPDATES - 1:
                (folder / "saved").mkdir()
                await trainer.save(folder / "saved")
            batch = await ends.batch(SAMPLING)
            await trainer.step(batch, partial(made.writing, ends.version + 1))
            ends.version += 1
        after = await trainer.logprobs(probe)
        difference = await ends.difference(SAMPLING)
        assert batch is not None
        await again.open()
        await again.restore(folder / "saved")
        await again.step(batch, nullcontext)
        return {
            "apart": difference,
            "moved": float(np.abs(after[0] - before[0]).max()),
            "resumed": bool(np.array_equal((await again.logprobs(probe))[0], after[0])) and same(trainer, again),
        }
    finally:
        await made.close()
        for end in (engine, trainer, again):
            await end.close()


def same(one: GrpoTrainer, other: GrpoTrainer) -> bool:
    return all(
        torch.equal(mine, its)
        for mine, its in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    )


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for bridge in BRIDGES:
        with tempfile.TemporaryDirectory(prefix="atropos-bench-") as scratch:
            folder = Path(scratch)
            model = folder / "model"
            small_model(config_of(name)).save_pretrained(model)
            for file in TOKENIZER:
                if (TOY_MODEL / file).exists():
                    shutil.copy(TOY_MODEL / file, model)
            try:
                found[bridge] = asyncio.run(asyncio.wait_for(over(bridge, model, folder), DEADLINE_S))
            except AtroposError as error:
                found[bridge] = {"refused": Exception.__str__(error).replace(str(model), "DIRECTORY")[:300]}
            except Exception as error:  # noqa: BLE001 - what a family's own code raises is the result
                found[bridge] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    return found


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    path = RESULTS / "models.json"
    whole = json.loads(path.read_text())
    bridges = whole.setdefault("bridges", {})
    for name in names or FAMILIES:
        bridges[name] = measured(name)
        console.say(f"{name}: {json.dumps(bridges[name])}")
    path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
