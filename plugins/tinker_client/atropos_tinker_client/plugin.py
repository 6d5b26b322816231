"""Offers the trainer, the engine and the bridge "tinker"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.errors import ConfigError
from atropos_core.plugins.model_provider import BridgeProvider, EngineProvider, TrainerProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Engine, Trainer, Transport
    from atropos_core.plugins.model_provider import Workload
    from atropos_tinker_client.config import TinkerBridgeOptions, TinkerEngineOptions, TinkerTrainerOptions


def build_trainer(options: TinkerTrainerOptions, context: RunContext) -> Trainer:
    from atropos_tinker_client.trainer import TinkerTrainer

    return TinkerTrainer(options, context)


def build_engine(options: TinkerEngineOptions, context: RunContext) -> Engine:
    from atropos_tinker_client.engine import TinkerEngine

    return TinkerEngine(options, context)


def build_bridge(options: TinkerBridgeOptions, context: RunContext) -> Bridge:
    from atropos_tinker_client.bridge import TinkerBridge

    return TinkerBridge(options, context)


def check_trainer(options: TinkerTrainerOptions, workload: Workload) -> None:
    from atropos_tinker_client.service import check_environment

    check_environment("trainer")
    if workload.temperature != 1 or workload.truncated:
        raise ConfigError(
            "trainer 'tinker' trains what was sampled from the whole distribution at temperature 1: a Tinker server computes logprobs of "
            "no other.",
            remedy="Set sampling.temperature = 1, top_p = 1, top_k = 0 and min_p = 0.",
        )


def check_engine(options: TinkerEngineOptions, workload: Workload) -> None:
    from atropos_tinker_client.service import check_environment

    check_environment("engine")


def transports(options: Any) -> frozenset[Transport]:
    return frozenset({"remote"})


def idle(options: Any, devices: Sequence[str]) -> Mapping[str, str]:
    return dict.fromkeys(("devices", "threads"), "the server computes")


@hookimpl
def atropos_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        name="tinker",
        summary="a Tinker server trains a LoRA adapter: `atropos tinker`, or a hosted service",
        config="atropos_tinker_client.config:TinkerTrainerOptions",
        build=build_trainer,
        transports=transports,
        check=check_trainer,
        idle=idle,
        dtype=lambda options, workload: str(options.dtype),
        announces=lambda options: {"tinker/dtype": options.dtype},
        goes_with={"engine": "tinker", "bridge": "tinker"},
        requires=frozenset({"tinker"}),
        extra="sdk",
        runs_in="process",
    )


@hookimpl
def atropos_engines() -> Iterable[EngineProvider]:
    yield EngineProvider(
        name="tinker",
        summary="a Tinker server samples from the adapter that it trains",
        config="atropos_tinker_client.config:TinkerEngineOptions",
        build=build_engine,
        transports=transports,
        check=check_engine,
        idle=idle,
        requires=frozenset({"tinker"}),
        extra="sdk",
        runs_in="process",
    )


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="tinker",
        summary="a Tinker server saves each version for sampling, and the engines learn its path",
        config="atropos_tinker_client.config:TinkerBridgeOptions",
        build=build_bridge,
        transports=transports,
    )
