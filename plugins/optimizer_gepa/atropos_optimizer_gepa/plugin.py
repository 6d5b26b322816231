"""The plugin's components: the trainer `gepa`, the bridge `prompt` and the environment `prompted`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider, TrainerProvider
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Environment, Trainer
    from atropos_core.plugins.model_provider import Workload
    from atropos_core.plugins.options import NoOptions
    from atropos_optimizer_gepa.config import GepaOptions, PromptedOptions


def build_trainer(options: GepaOptions, context: RunContext) -> Trainer:
    from atropos_optimizer_gepa.trainer import GepaTrainer

    return GepaTrainer(options, context)


def build_bridge(options: NoOptions, context: RunContext) -> Bridge:
    from atropos_optimizer_gepa.prompted import PromptBridge

    return PromptBridge(context.directory)


def build_environment(options: PromptedOptions, context: RunContext) -> Environment:
    from atropos_core.config.resolve import inner
    from atropos_optimizer_gepa.prompted import prompted

    label = f"{context.label or 'environment.prompted'}.environment"
    return prompted(options, inner("environment", label, options.environment).build(context), context)


def check(options: GepaOptions, workload: Workload) -> None:
    """Raises ConfigError for a run whose rewards would not be those of one prompt each."""
    from atropos_core.launch.fit import refuse_changed_rewards

    refuse_changed_rewards("gepa", "prompt", workload.context)


@hookimpl
def atropos_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        "gepa", "a prompt that evolves by reflection; the model stays as it is", "atropos_optimizer_gepa.config:GepaOptions",
        build_trainer, transports=lambda options: frozenset({"prompt"}), check=check,
        requires=frozenset({"torch", "transformers"}),
    )  # fmt: skip


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        "prompt", "the prompt of trainer 'gepa' to environments 'prompted' of this process", None, build_bridge,
        transports=lambda options: frozenset({"prompt"}),
    )  # fmt: skip


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "prompted", "another environment's tasks behind a prompt", "atropos_optimizer_gepa.config:PromptedOptions",
        build_environment, argument="environment",
    )  # fmt: skip
