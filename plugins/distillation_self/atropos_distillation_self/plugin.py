"""The provider of the teacher `self`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.errors import FitError
from atropos_core.plugins.provider import RunContext, TeacherProvider

if TYPE_CHECKING:
    from atropos_core.interfaces import Teacher
    from atropos_core.plugins.provider import Holding, Workload
    from atropos_distillation_self.config import SelfOptions


def build(options: SelfOptions, context: RunContext) -> Teacher:
    """Build the teacher. Raises FitError if the trainer would not learn from it, or if the run saves nothing that it could load."""
    from atropos_distillation_self.teacher import SelfTeacher

    kind, label = context.announced.get("distillation", "unknown"), context.label
    if kind is None:
        raise FitError(
            f"[{label}] annotates every group, but the trainer ignores the annotations: [trainer.distillation] is unset.",
            remedy="Add --set trainer.distillation.kind=reverse, or remove the teacher.",
        )
    if context.transport == "adapter":
        raise FitError(
            f"[{label}] takes whole models from the run's checkpoints, and this run trains an adapter.",
            remedy="Train all weights: take [trainer.lora] out, and name another bridge.",
        )
    return SelfTeacher(options, engine_context(options, context), 0 if kind == "reverse" else options.top_k)


def holds(options: SelfOptions, workload: Workload) -> Iterable[Holding]:
    """Return the engine's memory for scoring one group at a time: it is a second copy of the policy."""
    engine, context = options.resolved_engine(), engine_context(options, workload.context)
    load = dataclasses.replace(workload, context=context, concurrent_rollouts=workload.group_size)
    return engine.holds(load)


def roles(options: SelfOptions, label: str) -> Mapping[str, tuple[str, ...]]:
    from atropos_core.config.resolve import placed

    return {label.replace(".", "-"): placed(options.engine).devices}  # as it is started


def engine_context(options: SelfOptions, context: RunContext) -> RunContext:
    """Return the context of an engine on its own devices, which loads whole models while it runs."""
    from atropos_core.config.resolve import placed

    on = placed(options.engine)
    context = dataclasses.replace(context, devices=on.devices, threads=on.threads, announced={}, max_staleness=0)
    return dataclasses.replace(context, transport="checkpoint", transports=("checkpoint",))


@hookimpl
def atropos_teachers() -> Iterable[TeacherProvider]:
    yield TeacherProvider(
        name="self", summary="the policy itself, shown a reply that succeeded or what the environment said",
        config="atropos_distillation_self.config:SelfOptions", build=build, holds=holds, roles=roles,
    )  # fmt: skip
