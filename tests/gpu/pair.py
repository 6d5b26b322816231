"""An engine in one process, a trainer in another, and bridge "ipc" between them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedEngine, HostedTrainer
from atropos_core.types import Tokens

ROOT = Path(__file__).parents[2]
SOURCES = [
    str(ROOT),
    *(
        str(ROOT / folder)
        for folder in (
            "libs/torch_models",
            "plugins/bridge_ipc",
            "plugins/bridge_nccl",
            "plugins/engine_hf",
            "plugins/trainer_grpo",
        )
    ),
]
THREADS = 2


@dataclass(frozen=True)
class Setting:
    """Where the checks run, and on how large a model those that look at size."""

    device: str  # "cuda:0", "cpu"
    parameters: float = 3e9
    small: bool = False  # whether updates alone are measured on a tiny model
    model: str | None = None  # a pretrained model, of the checks in which one learns
    pages: Path | None = None  # the folder that takes the pages of their runs

    @property
    def transport(self) -> str:
        return "posix_shm" if self.device == "cpu" else "cuda_ipc"


class Pair:
    """Both processes. `open` and `connect` come first."""

    def __init__(self, setting: Setting, model: Path, folder: Path, engine: Child, trainer: Child) -> None:
        from atropos_bridge_ipc.bridge import IpcBridge

        self.children = (engine, trainer)
        self.engine, self.trainer = HostedEngine(engine), HostedTrainer(trainer)
        options = SimpleNamespace(connect_deadline_s=300.0, copies=False)
        context = SimpleNamespace(
            directory=folder, model=model, transport=setting.transport, transports=(setting.transport,), announced={}
        )
        self.bridge = IpcBridge(options, context)  # type: ignore[arg-type] # no pydantic: tests/gpu/host.py

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self.children]

    async def warm(self) -> None:
        await asyncio.gather(*(child.peer.call("warm", deadline_s=120) for child in self.children))

    async def open(self, *, holder: bool) -> None:
        """Load the engine's weights; the trainer makes a skeleton: of the real one, or of one with no optimiser."""
        await self.engine.open()
        if holder:
            await self.children[1].peer.call("open_holder", deadline_s=300)
        else:
            await self.trainer.open()

    async def connect(self) -> None:
        extensions = self.bridge.extensions()
        await self.engine.endpoint.load_extension(extensions["engine"])
        await self.trainer.endpoint.load_extension(extensions["trainer"])
        await self.bridge.connect(self.trainer.endpoint, [self.engine])

    async def scale(self, factor: float) -> None:
        await self.children[1].peer.call("scale", factor, deadline_s=60)

    async def ask_engine(self, method: str, *arguments: Any) -> Any:
        return await self.children[0].peer.call(method, *arguments, deadline_s=120)


def ids(random: np.random.Generator, vocabulary: int, length: int) -> Tokens:
    return random.integers(0, vocabulary, length, dtype=np.int32)


@asynccontextmanager
async def started(
    setting: Setting, model: Path, dtype: str, *, holder: bool, vllm: Mapping[str, Any] | None = None
) -> AsyncIterator[Pair]:
    """Both processes, with nothing loaded. They are ended at the end. The engine is "hf", or "vllm" with these options."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
        context = {
            "directory": folder, "model": model, "seed": 0, "deterministic": False, "transport": setting.transport,
            "transports": [setting.transport], "devices": [setting.device], "threads": THREADS, "steps": 0,
            "announced": {"weight_transfer": "atropos_ipc"},  # of what vLLM is to start with
            "max_staleness": 0,
        }  # fmt: skip
        begun = await asyncio.gather(
            *(
                Child.start(
                    role,
                    {"kind": kind, "name": "vllm", "options": {"dtype": dtype, **options}, "context": context},
                    folder / f"{role}.log",
                    threads=THREADS,
                    environment={"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
                    program="tests.gpu.host"
                    if role == "trainer" or vllm is None
                    else "atropos_core.processes.child_main",
                )
                for role, kind, options in (
                    ("engine", "engine", vllm or {}),
                    ("trainer", "holder" if holder else "trainer", {}),
                )
            ),
            return_exceptions=True,
        )
        children = [child for child in begun if isinstance(child, Child)]
        try:
            for child in begun:
                if isinstance(child, BaseException):
                    raise child
            yield Pair(setting, model, folder, *children)
        finally:
            for child in children:
                await child.close()
