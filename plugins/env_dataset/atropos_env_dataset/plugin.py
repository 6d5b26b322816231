"""Register the environment `dataset`, and the reader of rows for a warm start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_core.plugins.services import OpenWarmup, WarmupRows
    from atropos_env_dataset.config import DatasetOptions


def build(options: DatasetOptions, context: RunContext) -> Environment:
    from atropos_env_dataset.environment import Dataset

    return Dataset(options, context.label, context.model)


def open_warmup(section: Any, tokenizer: Any, *, max_tokens: int, seed: int) -> WarmupRows:
    from atropos_env_dataset.completions import open_completions

    return open_completions(section, tokenizer, max_tokens=max_tokens, seed=seed)


@hookimpl
def atropos_warmups() -> Iterable[OpenWarmup]:
    yield open_warmup


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "dataset",
        "your own rows of prompts and answers: dataset:train.jsonl",
        "atropos_env_dataset.config:DatasetOptions",
        build,
        argument="tasks",
    )
