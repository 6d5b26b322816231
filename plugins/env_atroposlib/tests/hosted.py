"""An environment in a real, separate process, sampled from the toy engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from atropos_core.builtin.config import ToyEngineOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.toy import ToyEngine
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.runner import checked_episode
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Sampling
from atropos_env_atroposlib.environment import AtroposlibEnvironment
from atropos_env_atroposlib.options import AtroposlibOptions

T = TypeVar("T")
FILES = Path(__file__).parent / "files"
N = 4


def within_environment(
    tmp_path: Path, use: Callable[[AtroposlibEnvironment, Any], Awaitable[T]], file: str, **options: Any
) -> T:
    async def run() -> T:
        context = RunContext(tmp_path, TOY_MODEL, label="environment.it")
        engine = ToyEngine(ToyEngineOptions(), context)
        policy = EnginePolicy(engine, ChatTokenizer(TOY_MODEL), Sampling(max_tokens=8), deadline_s=60)
        environment = AtroposlibEnvironment(AtroposlibOptions(file=f"{FILES / file}", **options), context)
        try:
            await environment.open()
            return await use(environment, policy)
        finally:
            await environment.close()

    return asyncio.run(run())


async def group_of(environment: AtroposlibEnvironment, policy: Any, index: int = 0, n: int = N) -> list[Any]:
    task = environment.tasks("train")[index]
    given = await environment.rollout_group(task, policy, n, seeds=[index * 100 + member for member in range(n)])
    return [checked_episode(one, 10_000) for one in given if not isinstance(one, BaseException)]
