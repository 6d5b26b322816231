"""Register the teachers `distillation` and `self`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.errors import FitError
from atropos_core.plugins.model_provider import TeacherProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Teacher
    from atropos_core.plugins.model_provider import MemoryUse, Workload
    from atropos_distillation.config import SelfOptions, TeacherOptions


def build(options: TeacherOptions, context: RunContext) -> Teacher:
    """Build the teacher `distillation`. Raises FitError if the trainer would not learn from it."""
    from atropos_core import console
    from atropos_distillation.scoring_engine import ScoringEngine
    from atropos_distillation.server import ServerSource
    from atropos_distillation.teacher import LogprobSource, TokenTeacher
    from atropos_distillation.tokenizers import refuse_another

    kind = _kind(context, "forward")
    _check_top_k(options, kind, context.label)
    source: LogprobSource
    if options.url is not None:
        assert options.tokenizer is not None, "the options' validator wants it with a url"
        directory = _directory(options.tokenizer)
        source = ServerSource(options, context.patience)
    else:
        assert options.model is not None, "the options' validator wants it without a url"
        directory = _directory(options.model)
        engine = options.resolved_engine()
        for line in engine.idle():
            console.warn(f"{context.label}: {line}")
        source = ScoringEngine(engine, teacher_context(options, context, directory))
    refuse_another(directory, context.model, context.label)
    return TokenTeacher(options, source, options.requests_of(kind), context.label)


def build_self(options: SelfOptions, context: RunContext) -> Teacher:
    """Build the teacher `self`. Raises FitError if the trainer would not learn from it, or if the run saves nothing that it could load."""
    from atropos_distillation.self_teacher import SelfTeacher

    kind, label = _kind(context, "reverse"), context.label
    if context.transport == "adapter":
        raise FitError(
            f"[{label}] takes whole models from the run's checkpoints, and this run trains an adapter.",
            remedy="Train all weights: take [trainer.lora] out, and name another bridge.",
        )
    return SelfTeacher(options, policy_context(options, context), 0 if kind == "reverse" else options.top_k)


def holds(options: TeacherOptions, workload: Workload) -> Iterable[MemoryUse]:
    """Return the memory of the teacher's engine, for as many sequences as it scores at once."""
    if options.model is None:
        return ()
    context = teacher_context(options, workload.context, _directory(options.model))
    return _held(options, workload, context, options.sequences_at_once)


def holds_self(options: SelfOptions, workload: Workload) -> Iterable[MemoryUse]:
    """Return the engine's memory for scoring one group at a time: it is a second copy of the policy."""
    return _held(options, workload, policy_context(options, workload.context), workload.group_size)


def roles(options: TeacherOptions, label: str) -> Mapping[str, tuple[str, ...]]:
    """Return the role of its engine, if it has one."""
    return {} if options.model is None else engine_role(options, label)


def engine_role(options: TeacherOptions | SelfOptions, label: str) -> Mapping[str, tuple[str, ...]]:
    from atropos_core.config.resolve import placed
    from atropos_distillation.scoring_engine import role_of

    return {role_of(label): placed(options.engine).devices}


def teacher_context(options: TeacherOptions, context: RunContext, model: Path) -> RunContext:
    """Return the context of the teacher's engine: its own model and devices, without the run's weights."""
    return dataclasses.replace(_on_its_devices(options, context), model=model, transport=None, transports=())


def policy_context(options: SelfOptions, context: RunContext) -> RunContext:
    """Return the context of an engine on its own devices, which loads whole models while it runs."""
    return dataclasses.replace(_on_its_devices(options, context), transport="checkpoint", transports=("checkpoint",))


def _on_its_devices(options: TeacherOptions | SelfOptions, context: RunContext) -> RunContext:
    from atropos_core.config.resolve import placed

    on = placed(options.engine)
    return dataclasses.replace(context, devices=on.devices, threads=on.threads, announced={}, max_staleness=0)


def _held(
    options: TeacherOptions | SelfOptions, workload: Workload, context: RunContext, sequences: int
) -> Iterable[MemoryUse]:
    engine = options.resolved_engine()
    load = dataclasses.replace(workload, context=context, concurrent_rollouts=sequences)
    return engine.holds(load)


def _kind(context: RunContext, advised: str) -> Any:
    """Return how the trainer distils: "forward", "reverse" or "unknown". Raises FitError if it does not."""
    kind = context.announced.get("distillation", "unknown")
    if kind is None:
        raise FitError(
            f"[{context.label}] annotates every group, but the trainer ignores the annotations: [trainer.distillation] is unset.",
            remedy=f"Add --set trainer.distillation.kind={advised}, or remove the teacher.",
        )
    return kind


def _check_top_k(options: TeacherOptions, kind: str, label: str) -> None:
    if kind == "reverse" and options.top_k:
        raise FitError(
            f'{label}.top_k = {options.top_k} is not possible: trainer.distillation.kind = "reverse" needs the logprob of the '
            "sampled token, which may not be among the likeliest tokens.",
            remedy=f"Leave {label}.top_k unset, or set it to 0.",
        )
    if kind == "forward" and options.top_k == 0:
        raise FitError(
            f'{label}.top_k = 0 gives only the logprob of the sampled token, but trainer.distillation.kind = "forward" needs '
            "the teacher's likeliest tokens.",
            remedy=f'Leave {label}.top_k unset, or set trainer.distillation.kind = "reverse".',
        )


def _directory(reference: str) -> Path:
    from atropos_core.plugins.manager import load_plugins

    return load_plugins().resolve_model(reference).directory


@hookimpl
def atropos_teachers() -> Iterable[TeacherProvider]:
    yield TeacherProvider(
        name="distillation",
        summary="logprobs of a teacher's model, on an engine of its own or behind a server",
        config="atropos_distillation.config:TeacherOptions",
        build=build,
        holds=holds,
        roles=roles,
    )
    yield TeacherProvider(
        name="self",
        summary="the policy itself, shown a reply that succeeded or what the environment said",
        config="atropos_distillation.config:SelfOptions",
        build=build_self,
        holds=holds_self,
        roles=engine_role,
    )
