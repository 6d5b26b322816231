"""Register the transforms `zscore`, `length_penalty` and `equal_group`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Transform
    from atropos_normalization.config import EqualGroupOptions, LengthPenaltyOptions, ZScoreOptions

CONFIG = "atropos_normalization.config"


def build_zscore(options: ZScoreOptions, context: RunContext) -> Transform:
    from atropos_normalization.zscore import ZScore, warn_if_idle

    warn_if_idle(options, context.announced)
    return ZScore(options)


def build_length_penalty(options: LengthPenaltyOptions, context: RunContext) -> Transform:
    from atropos_normalization.lengths import LengthPenalty

    return LengthPenalty(options)


def build_equal_group(options: EqualGroupOptions, context: RunContext) -> Transform:
    from atropos_normalization.lengths import EqualGroup

    return EqualGroup(options)


@hookimpl
def atropos_transforms() -> Iterable[Provider[Transform]]:
    yield Provider("zscore", "rewards by their running mean and deviation", f"{CONFIG}:ZScoreOptions", build_zscore)
    yield Provider(
        "length_penalty", "less reward for long replies", f"{CONFIG}:LengthPenaltyOptions", build_length_penalty
    )
    yield Provider(
        "equal_group", "length decides if all replies are right", f"{CONFIG}:EqualGroupOptions", build_equal_group
    )
