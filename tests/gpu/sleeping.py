"""Engine "vllm" with `enable_sleep_mode`: how much memory it gives back, how long that takes, and whether it samples the same after it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedEngine
from atropos_core.types import Completion, Sampling, tokens
from tests.gpu.memory import Memory

ROUNDS = 3
PROMPT = tokens(np.random.default_rng(4).integers(3, 600, 128))
CALL_S = 300.0
CACHE_GB = 1.0  # on a CPU; on a GPU the engine has its share of it


@dataclass
class Slept:
    """Bytes of the device, or of the engine's processes."""

    opened_bytes: int  # that starting the engine took
    given_back_bytes: list[int] = field(default_factory=list)
    release_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # with the return of the memory
    made: list[Completion] = field(default_factory=list)  # one before the first release, and one after each


async def slept(device: str, model: Path, folder: Path) -> Slept:
    """The engine in a process of its own, `ROUNDS` times."""
    before = Memory(device).used_bytes()
    context = {
        "directory": folder,
        "model": model,
        "transport": None,
        "devices": (device,),
        "threads": 2,
        "announced": {},
    }
    options = {"enable_sleep_mode": True, "kv_cache_gb": CACHE_GB} if device == "cpu" else {"enable_sleep_mode": True}
    wanted = {"kind": "engine", "name": "vllm", "options": options, "context": context}
    child = await Child.start("engine", wanted, folder / "engine.log", threads=2)
    engine = HostedEngine(child)
    try:
        await engine.open()
        own = psutil.Process(child.process.pid)
        memory = Memory(device, [own.pid, *(one.pid for one in own.children(recursive=True))])
        found = Slept(memory.used_bytes() - before)
        for _ in range(ROUNDS):
            found.made += await engine.sample(PROMPT, 1, Sampling(32, 0.0), [1], CALL_S)
            held = memory.used_bytes()
            start = time.perf_counter()
            await engine.release_cache()
            found.release_s.append(time.perf_counter() - start)
            found.given_back_bytes.append(held - memory.used_bytes())
            start = time.perf_counter()
            await engine.sample(PROMPT, 1, Sampling(1, 0.0), [1], CALL_S)
            found.first_token_s.append(time.perf_counter() - start)
        found.made += await engine.sample(PROMPT, 1, Sampling(32, 0.0), [1], CALL_S)
        return found
    finally:
        await engine.close()
