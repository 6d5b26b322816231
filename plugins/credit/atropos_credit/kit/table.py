"""The table of `atropos bias`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atropos_credit.kit.expectation import Measured, measured
from atropos_credit.kit.known import Known
from atropos_credit.kit.policy import listed
from atropos_credit.kit.worlds import WORLDS

NOISE_IN = "stopping"  # the world whose noise is in the table
EXACT = 1e-9  # below this, what is left is the rounding of float64


class Measurement(NamedTuple):
    """One estimator, in each world that it was measured in."""

    known: Known
    measured: Mapping[str, Measured]


def rows(estimators: Sequence[Known], group_size: int, seed: int) -> list[Measurement]:
    policies = {name: listed(world, seed) for name, world in WORLDS.items()}
    return [
        Measurement(
            one,
            {
                world: measured(
                    one.estimator,
                    policies[world],
                    one.objective(group_size),
                    group_size=group_size,
                    average=one.average,
                )
                for world in one.worlds
            },
        )
        for one in estimators
    ]


def columns(every: Sequence[Measurement]) -> list[str]:
    return ["estimator", "objective", *(f"bias: {world}" for world in _worlds(every)), "turned", "noise"]


def cells(row: Measurement, every: Sequence[Measurement]) -> list[str]:
    found = row.measured
    biases = [percent(found[world].bias) if world in found else "" for world in _worlds(every)]
    noise = found.get(NOISE_IN, next(iter(found.values()))).noise
    return [
        row.known.name, row.known.objective_name, *biases, percent(max(one.turned for one in found.values())),
        f"{noise:.2f}",
    ]  # fmt: skip


def _worlds(every: Sequence[Measurement]) -> list[str]:
    return [world for world in WORLDS if any(world in row.measured for row in every)]


def percent(share: float, exact: float = EXACT) -> str:
    """A share as a text of two digits, or a bound if what is left is rounding."""
    if share < exact:
        return f"below {exact:.0e}".replace("e-0", "e-")
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"
