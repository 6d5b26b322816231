"""The components of a run while it runs, and how they are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from atropos_core.guards.deadlines import within
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import (
    Bridge,
    Curriculum,
    Engine,
    Environment,
    Measured,
    Sink,
    Stateful,
    Teacher,
    Trainer,
    Transform,
)
from atropos_core.launchers import Launcher, RunWorkers
from atropos_core.observe.profile import Profile
from atropos_core.processes.child import Child
from atropos_core.processes.local import LocalLauncher
from atropos_core.processes.proxies import HostedReward
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.training.warm_start import WarmStart
from atropos_core.types import Metrics, Split

CLOSE_DEADLINE_S = 30.0


@runtime_checkable
class Closable(Protocol):
    async def close(self) -> None: ...


@runtime_checkable
class Openable(Protocol):
    async def open(self) -> None: ...


@dataclass
class Parts:
    """The components of a run. `close` ends all of them, whatever state they are in."""

    environments: dict[str, Environment]
    rewards: list[WeightedReward]
    engines: list[Engine]
    engine: Engine  # all of them as one
    trainer: Trainer
    bridge: Bridge
    curriculum: Curriculum
    transforms: dict[str, Transform]  # by name, in the order of the run file
    teachers: dict[str, Teacher]
    sinks: dict[str, Sink]
    children: list[Child]
    tasks: Mapping[str, Mapping[Split, int]] = field(default_factory=dict)  # how many each environment has
    launcher: Launcher = field(default_factory=LocalLauncher)  # which started them
    # Engines that have metrics, by the start of the metrics' names.
    measured: Mapping[str, Engine] = field(default_factory=dict)
    warmup: WarmStart | None = None  # None once it is done
    workers: RunWorkers | None = None  # of the launcher, which ends them
    opened: list[Closable] = field(default_factory=list)  # what the run opened on top of these; closed first
    profile: Profile = field(default_factory=Profile)

    def by_label(self) -> dict[str, Any]:
        """Return every part that may have state or metrics, by its path in the run file."""
        named: dict[str, Any] = {"curriculum": self.curriculum}
        named |= {f"environment.{name}": environment for name, environment in self.environments.items()}
        named |= {f"reward.{of.name}": of.reward for of in self.rewards}
        named |= {f"teacher.{name}": teacher for name, teacher in self.teachers.items()}
        named |= {f"transform.{name}": transform for name, transform in self.transforms.items()}
        return named | {f"sink.{name}": sink for name, sink in self.sinks.items()}

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that has state to save, by its path in the run file."""
        return {label: part for label, part in self.by_label().items() if isinstance(part, Stateful)}

    def metrics(self) -> Metrics:
        """Return the parts' metrics of the step that has ended: `reward/NAME/...`, `transform/NAME/...`, `curriculum/...`."""
        return {
            f"{label.replace('.', '/')}/{name}": float(value)
            for label, part in self.by_label().items()
            if isinstance(part, Measured)
            for name, value in part.metrics().items()
        }

    async def engine_metrics(self) -> Metrics:
        """Return the engines' metrics since the last call: `engine/NAME`. Calls only engines that have some."""
        return {
            f"{path}/{name}": float(value)
            for path, engine in self.measured.items()
            for name, value in (await engine.step_metrics()).items()
        }

    async def close(self) -> list[Exception]:
        """Close what depends on the parts, then the parts in this process, then the child processes. Tries all, and returns the
        exceptions."""
        hosted: list[Closable] = [self.trainer, *self.engines]
        hosted += [of.reward for of in self.rewards if isinstance(of.reward, HostedReward)]
        here = [self.bridge, *self.by_label().values()]
        errors = await _close_all(self.opened)
        errors += await _close_all([part for part in here if isinstance(part, Closable) and part not in hosted])
        errors += await _close_all(hosted)
        return errors + await _close_all([self.launcher])


async def _close_all(parts: Sequence[Closable]) -> list[Exception]:
    closing = [within(part.close(), CLOSE_DEADLINE_S, f"{type(part).__name__}: close()") for part in parts]
    ended = await asyncio.gather(*closing, return_exceptions=True)
    return [error for error in ended if isinstance(error, Exception)]


@dataclass(frozen=True)
class ScoringParts:
    """The parts that score recorded rollouts and compute their advantages."""

    environments: Mapping[str, Environment]
    rewards: Sequence[WeightedReward]
    transforms: Mapping[str, Transform]  # by name, in the order of the run file


@dataclass
class EvaluationParts:
    """The parts of a run that an evaluation needs: no trainer, no bridge."""

    environments: dict[str, Environment]
    rewards: list[WeightedReward]
    engine: Engine
    children: list[Child]
    launcher: Launcher = field(default_factory=LocalLauncher)

    async def close(self) -> None:
        """Close environments and engine, then the processes. Tries all; then raises the first error, with the others as notes."""
        rewards = [of.reward for of in self.rewards if isinstance(of.reward, Closable)]
        errors = await _close_all([*self.environments.values(), *rewards, self.engine])
        await asyncio.gather(*(child.close() for child in self.children))
        raise_first(errors + await _close_all([self.launcher]))
