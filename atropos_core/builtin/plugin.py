"""The built-in components. Their modules are imported when a run names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TrainerProvider
from atropos_core.plugins.provider import LauncherProvider, Provider, ResolvedModel, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Curriculum, Reward, Sink, Transform, Transport
    from atropos_core.launchers import Launcher

CONFIG = "atropos_core.builtin.config"
TOY_MODEL = Path(__file__).parent / "toy_model"


def _of(module: str, make: Callable[[Any, Any, RunContext], Any]) -> Callable[[Any, RunContext], Any]:
    """Return a `build` that imports `atropos_core.builtin.MODULE` first: make(module, options, context)."""
    return lambda options, context: make(import_module(f"atropos_core.builtin.{module}"), options, context)


def _in_process(options: object) -> frozenset[Transport]:
    return frozenset({"in_process"})


def _in_the_run(options: object, devices: object) -> Mapping[str, str]:
    """Return why the toy's devices and threads have no effect: it is numpy in the run's own process."""
    return dict.fromkeys(("devices", "threads"), "which runs in the run's own process, on the CPU")


@hookimpl
def atropos_rewards() -> Iterable[Provider[Reward]]:
    def made(name: str, summary: str, options: Any, make: Callable[[Any, Any, RunContext], Any]) -> Provider[Reward]:
        return Provider(name, summary, options, _of("rewards", make))

    yield made("environment", "the score that the environment gave", None, lambda m, o, c: m.EnvironmentReward())
    yield made("exact", "1 if the reply is the answer", f"{CONFIG}:ExactOptions", lambda m, o, c: m.ExactReward(o))
    yield made(
        "numeric", "1 if its last number is right", f"{CONFIG}:NumericOptions", lambda m, o, c: m.NumericReward(o)
    )
    yield made("format", "the share of patterns it has", f"{CONFIG}:FormatOptions", lambda m, o, c: m.FormatReward(o))
    yield made(
        "length", "0 for short, down to -1 for long", f"{CONFIG}:LengthOptions", lambda m, o, c: m.LengthReward(o)
    )


@hookimpl
def atropos_transforms() -> Iterable[Provider[Transform]]:
    advantage = _of("transforms", lambda m, o, c: m.GroupAdvantage(o))
    summary = "reward against the group's mean, by its deviation (GRPO)"
    options = f"{CONFIG}:GroupAdvantageOptions"
    yield Provider("group_advantage", summary, options, advantage, announces=lambda o: {"advantages": o.announced()})
    flat = _of("transforms", lambda m, o, c: m.DropFlat())
    leave_out = "leave out groups whose rewards are all equal"
    yield Provider("drop_flat", leave_out, None, flat, announces=lambda o: {"flat_groups": "left out"})


@hookimpl
def atropos_curricula() -> Iterable[Provider[Curriculum]]:
    def ordered(*, shuffled: bool) -> Callable[[Any, RunContext], Any]:
        return _of("curricula", lambda m, o, c: m.OrderedCurriculum(c.seed, shuffled=shuffled))

    yield Provider("shuffled", "every task once an epoch, in a new order each time", None, ordered(shuffled=True))
    yield Provider("sequential", "every task once an epoch, in the data's order", None, ordered(shuffled=False))


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    console = _of("progress", lambda m, o, c: m.ConsoleSink(c.steps, c.warmup_steps))
    yield Provider("console", "progress on the terminal", None, console)
    jsonl = _of("sinks", lambda m, o, c: m.JsonlSink(o, c.directory))
    summary = "metrics.jsonl and rollouts/ in the run directory"
    yield Provider("jsonl", summary, f"{CONFIG}:JsonlOptions", jsonl, announces=lambda o: {"writes": "metrics.jsonl"})


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    local = _of("local", lambda m, o, c: m.LocalBridge())
    yield BridgeProvider("local", "for an engine and a trainer in one process", None, local, transports=_in_process)


def _local(options: object, context: RunContext) -> Launcher:
    from atropos_core.processes.local import LocalLauncher

    return LocalLauncher()


@hookimpl
def atropos_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider("local", "processes of this machine", None, _local)


@hookimpl
def atropos_engines() -> Iterable[EngineProvider]:
    toy = _of("toy", lambda m, o, c: m.ToyEngine(o, c))
    yield EngineProvider(
        "toy",
        "a table of next-token logits, for tests",
        f"{CONFIG}:ToyEngineOptions",
        toy,
        transports=_in_process,
        idle=_in_the_run,
    )


@hookimpl
def atropos_trainers() -> Iterable[TrainerProvider]:
    toy = _of("toy", lambda m, o, c: m.ToyTrainer(o, c))
    yield TrainerProvider(
        "toy",
        "REINFORCE on the toy table, for tests",
        f"{CONFIG}:ToyTrainerOptions",
        toy,
        transports=_in_process,
        idle=_in_the_run,
    )


@hookimpl
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    if reference != "toy":
        return None
    parts = {"engine": {"use": "toy"}, "trainer": {"use": "toy"}, "bridge": {"use": "local"}}
    return ResolvedModel(TOY_MODEL, "a table of next-token logits, for tests", {**parts, "sampling": {"max_tokens": 8}})
