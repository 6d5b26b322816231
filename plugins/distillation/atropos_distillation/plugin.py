"""The provider of the teacher `distillation`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.errors import FitError
from atropos_core.plugins.provider import RunContext, TeacherProvider

if TYPE_CHECKING:
    from atropos_core.interfaces import Teacher
    from atropos_core.plugins.provider import Holding, Workload
    from atropos_distillation.config import TeacherOptions


def build(options: TeacherOptions, context: RunContext) -> Teacher:
    from atropos_core import console
    from atropos_distillation.teacher import EngineSource, LogprobSource, ServerSource, TokenTeacher
    from atropos_distillation.tokenizers import refuse_another

    kind = context.announced.get("distillation", "unknown")
    _refuse_what_nobody_reads(options, kind, context.label)
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
        source = EngineSource(engine, teacher_context(options, context, directory))
    refuse_another(directory, context.model, context.label)
    return TokenTeacher(options, source, options.requests_of(kind), context.label)


def holds(options: TeacherOptions, workload: Workload) -> Iterable[Holding]:
    """The memory of the teacher's engine, for as many sequences as it scores at once."""
    if options.model is None:
        return ()
    engine = options.resolved_engine()
    context = teacher_context(options, workload.context, _directory(options.model))
    load = dataclasses.replace(workload, context=context, concurrent_rollouts=options.sequences_at_once)
    return engine.holds(load)


def roles(options: TeacherOptions, label: str) -> Mapping[str, tuple[str, ...]]:
    """The role of its engine, if it has one."""
    from atropos_core.config.resolve import placed
    from atropos_core.rollouts.scoring_engine import role_of

    return {} if options.model is None else {role_of(label): placed(options.engine).devices}


def teacher_context(options: TeacherOptions, context: RunContext, model: Path) -> RunContext:
    """Return the context of the teacher's engine: its own model and devices, without the run's weights."""
    from atropos_core.config.resolve import placed

    component = placed(options.engine)
    return dataclasses.replace(
        context, model=model, transport=None, transports=(), announced={}, max_staleness=0,
        devices=component.devices, threads=component.threads,
    )  # fmt: skip


def _refuse_what_nobody_reads(options: TeacherOptions, kind: Any, label: str) -> None:
    if kind is None:
        raise FitError(
            f"[{label}] annotates every group, but the trainer ignores the annotations: [trainer.distillation] is unset.",
            remedy="Add --set trainer.distillation.kind=forward, or remove the teacher.",
        )
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
