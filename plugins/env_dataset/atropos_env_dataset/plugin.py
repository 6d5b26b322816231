"""Register the environment `dataset`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_dataset.config import DatasetOptions


def build(options: DatasetOptions, context: RunContext) -> Environment:
    from atropos_env_dataset.environment import Dataset

    return Dataset(options, context.label, context.model)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "dataset",
        "your own rows of prompts and answers: dataset:train.jsonl",
        "atropos_env_dataset.config:DatasetOptions",
        build,
        argument="tasks",
    )
