"""The trainer and the engine behind the server, each in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from atropos_core.config.resolve import ResolvedComponent, resolve_component
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import ModelInfo
from atropos_core.models.model_size import cpu_threads
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import ResolvedModel, RunContext
from atropos_core.processes.child import Child
from atropos_core.processes.proxies import HostedAdapterEngine, HostedStepwiseTrainer
from atropos_core.stepwise import AdapterEngine, StepwiseTrainer


@dataclass(frozen=True)
class Backends:
    """`info`: the trainer's description of the model."""

    trainer: StepwiseTrainer
    engine: AdapterEngine
    info: ModelInfo
    children: list[Child]


@asynccontextmanager
async def backends(
    config: RunConfig, model: ResolvedModel, plugins: Plugins, directory: Path, adapters: int
) -> AsyncIterator[Backends]:
    """Start both, open them, and end them after the block. `adapters`: how many the engine is to hold. Raises FitError for components
    that cannot serve adapters."""
    parts = {
        kind: resolve_component(plugins.registry, kind, kind, getattr(config, kind)) for kind in ("trainer", "engine")
    }
    children: list[Child] = []
    try:
        starting = [_start(one, config, model.directory, directory, adapters) for one in parts.values()]
        started = await asyncio.gather(*starting, return_exceptions=True)
        children += [one for one in started if isinstance(one, Child)]
        raise_first(started)
        trainer, engine = HostedStepwiseTrainer(cast(Child, started[0])), HostedAdapterEngine(cast(Child, started[1]))
        info, _ = await asyncio.gather(trainer.open(), engine.open())
        await _check(
            trainer.clear_gradient, f"trainer {config.trainer.use!r}", "train adapters call by call", "--trainer grpo"
        )
        await _check(
            engine.remove_adapter, f"engine {config.engine.use!r}", "sample from named adapters", "--engine hf"
        )
        yield Backends(trainer, engine, info, children)
    finally:
        await asyncio.gather(*(child.close() for child in children), return_exceptions=True)


async def _check(call: Callable[[str], Awaitable[None]], named: str, what: str, fix: str) -> None:
    """Raises FitError for a component without these calls. One that has them does not know this adapter."""
    try:
        await call("none")
    except DataError:
        pass
    except (ConfigError, NotImplementedError) as error:
        raise FitError(f"{named} cannot {what} here: {error}", remedy=f"Use {fix}.") from error


async def _start(resolved: ResolvedComponent, config: RunConfig, model: Path, directory: Path, adapters: int) -> Child:
    placed = resolved.component
    threads = getattr(placed, "threads", None) or cpu_threads(model)
    devices = resolved.devices
    context = RunContext(
        directory=directory,
        model=model,
        seed=config.seed,
        deterministic=config.deterministic or (resolved.offer.kind == "trainer" and devices == ("cpu",)),
        patience=config.watch.patience(),
        transport="adapter",  # the base model stays as it is
        transports=("adapter",),
        announced={"named_adapters": adapters},
        devices=devices,
        threads=threads,
        label=resolved.label,
    )
    return await resolved.start(context, resolved.role, threads, needed=True)
