"""Choose the environments that a curriculum draws from."""

from __future__ import annotations

from collections.abc import Mapping

from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import TaskSource


def with_weight(sources: Mapping[str, TaskSource]) -> dict[str, TaskSource]:
    """Return the sources that a curriculum draws from; a weight of 0 means only evaluation. Raises DataError for a source without
    tasks, ConfigError if no source is left."""
    for name, source in sources.items():
        if source.size == 0:
            raise DataError(
                f"environment {name!r} has no training tasks: its tasks('train') is empty.",
                remedy="Return tasks there, or name data that has rows, by the environment's options.",
            )
    if not (drawn := {name: source for name, source in sources.items() if source.weight > 0}):
        raise ConfigError("no environment has a weight above 0: there is nothing to train on.")
    return drawn
