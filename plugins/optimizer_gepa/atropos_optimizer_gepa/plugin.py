"""The plugin's components: the trainer `gepa`, the bridge `prompt` and the environment `prompted`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.errors import ConfigError
from atropos_core.plugins.model_provider import BridgeProvider, TrainerProvider
from atropos_core.plugins.provider import NoOptions, Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Environment, Trainer
    from atropos_core.plugins.model_provider import Workload
    from atropos_optimizer_gepa.config import GepaOptions, PromptedOptions

RAW_REWARDS = "--set transform.drop_flat.use=none --set transform.group_advantage.baseline=none"


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
    context = workload.context
    if context.max_staleness:
        raise ConfigError(
            "trainer 'gepa' must know which prompt was sampled with, and with training.max_staleness = "
            f"{context.max_staleness} a batch may be of several.",
            remedy="--set training.max_staleness=0",
        )
    said = context.announced.get("advantages")
    if said is None or said["baseline"] != "none":
        raise ConfigError(
            "trainer 'gepa' compares rewards between prompts, and a baseline within each group takes away what it compares.",
            remedy=f"{RAW_REWARDS}, and no other transform.",
        )
    if context.announced.get("flat_groups"):
        raise ConfigError(
            "trainer 'gepa' needs every reward of a prompt, and transform 'drop_flat' leaves out groups that were not rewarded: a prompt "
            "without any reward would be tried again and again.",
            remedy=RAW_REWARDS,
        )


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
        "prompt", "the prompt of trainer 'gepa' to environments 'prompted' of this process", NoOptions, build_bridge,
        transports=lambda options: frozenset({"prompt"}),
    )  # fmt: skip


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "prompted", "another environment's tasks behind a prompt", "atropos_optimizer_gepa.config:PromptedOptions",
        build_environment, argument="environment",
    )  # fmt: skip
