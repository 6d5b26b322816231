"""The learning rate of each parameter: the schedule over a run, and groups of parameters with separate rate and decay."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from atropos_core.errors import ConfigError

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions

_NUMBER = re.compile(r"\.\d+\.")
_SHOWN = 40  # names in an error


class ParameterGroup(NamedTuple):
    """Parameters that share a rate and whether they decay."""

    factor: float  # of the trainer's rate
    own: float | None  # a rate instead, before warm-up and schedule
    decays: bool

    def rate(self, learning_rate: float) -> float:
        """Return the rate, given the trainer's."""
        return self.factor * learning_rate if self.own is None else self.own


def schedule_factor(options: GrpoOptions, update: int, in_all: int) -> float:
    """Return the factor for the rates of update 0, 1, ... `in_all` - 1. It is linear from 1 / warmup_steps to 1, then
    follows the schedule from 1 to its floor. Update `in_all` would reach the floor, as with the schedulers of torch and
    transformers; later updates stay there."""
    warm = options.warmup_steps
    if update < warm:
        return (update + 1) / warm
    if options.schedule == "constant":
        return 1.0
    if not in_all:
        raise ConfigError(
            f'trainer.schedule = "{options.schedule}" falls over the steps of a run, and this one has none.',
            remedy='Set training.steps, or trainer.schedule = "constant".',
        )
    done = min((update - warm) / (in_all - warm), 1.0)
    left = 1.0 - done if options.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return options.schedule_floor + (1.0 - options.schedule_floor) * left


def updates_in_all(options: GrpoOptions, steps: int) -> int:
    """Return the number of updates in the run. Raises ConfigError if warm-up leaves none of them to a falling schedule."""
    in_all = steps * options.epochs * options.minibatches
    if options.schedule != "constant" and 0 < in_all <= options.warmup_steps:
        raise ConfigError(
            f'trainer.schedule = "{options.schedule}" falls after warm-up, and trainer.warmup_steps = {options.warmup_steps}'
            f" is all of the run's {in_all} optimiser steps.",
            remedy="Lower trainer.warmup_steps, or raise training.steps.",
        )
    return in_all


def parameter_groups(dimensions: Mapping[str, int], options: GrpoOptions) -> dict[str, ParameterGroup]:
    """Return the group of each parameter; `dimensions` gives its name and number of axes. Weight decay applies only to
    two or more axes, so not to norms and biases (nanoGPT; transformers' Trainer leaves out the same ones by name).
    Raises ConfigError for a pattern that is the first match of no parameter."""
    rules = [(re.compile(rule.pattern), rule) for rule in options.learning_rates]
    used: set[int] = set()
    found = {}
    for name, axes in dimensions.items():
        factor, own = 1.0, None
        for place, (pattern, rule) in enumerate(rules):
            if pattern.search(name):
                factor, own = 1.0 if rule.factor is None else rule.factor, rule.learning_rate
                used.add(place)
                break
        found[name] = ParameterGroup(factor, own, axes > 1)
    for place, (_, rule) in enumerate(rules):
        if place not in used:
            raise ConfigError(
                f"trainer.learning_rates: the pattern {rule.pattern!r} is the first match of no parameter that is trained. "
                f"There is: {_listed(list(dimensions))}."
            )
    return found


def _listed(names: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(_NUMBER.sub(".N.", name) for name in names))
    more = f" and {len(kinds) - _SHOWN} more" if len(kinds) > _SHOWN else ""
    return ", ".join(kinds[:_SHOWN]) + more
