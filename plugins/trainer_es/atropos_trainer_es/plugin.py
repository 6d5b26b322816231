"""The provider of the trainer `es`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.errors import ConfigError
from atropos_core.plugins.model_provider import TrainerProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Trainer
    from atropos_core.plugins.model_provider import Workload
    from atropos_trainer_es.config import EsOptions


def build(options: EsOptions, context: RunContext) -> Trainer:
    from atropos_trainer_es.trainer import EsTrainer

    return EsTrainer(options, context)


def check(options: EsOptions, workload: Workload) -> None:
    """Raises ConfigError for a run whose rewards would not be those of one member each."""
    from atropos_core.launch.fit import refuse_changed_rewards

    context, steps = workload.context, options.population + 1
    refuse_changed_rewards("es", "member", context)
    if context.steps % steps:
        raise ConfigError(
            f"training.steps = {context.steps} ends within a generation: one of population = {options.population} is {steps} steps.",
            remedy=f"--steps {max(context.steps // steps, 1) * steps}, or another trainer.population.",
        )


@hookimpl
def atropos_trainers() -> Iterable[TrainerProvider]:
    yield TrainerProvider(
        name="es",
        summary="evolution strategies: perturbed weights and their rewards, no backward pass",
        config="atropos_trainer_es.config:EsOptions",
        build=build,
        transports=lambda options: frozenset({"checkpoint"}),
        check=check,
        requires=frozenset({"torch", "transformers", "safetensors"}),
        runs_in="process",
    )
