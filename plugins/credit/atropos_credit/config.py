"""Options of the transforms `turn_returns`, `turn_gae`, `gigpo` and `maxrl`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from atropos_core.plugins.options import Options

State = Literal["observation", "history"]

# A reward is at most 1e9, so advantages stay below 1e30 with a million turns, and float32 ends at 3e38.
MOST_WEIGHT = 1e9

DISCOUNT = "factor of each later turn's reward; below 1 the gradient is not exactly that of an objective"
OUTCOME_WEIGHT = "factor of the outcome reward, which only the end earned"
TURN_WEIGHT = "factor of the turn rewards"
STATE = (
    "turns in equal states can be compared. observation: the tokens between the last turn and this one, or before the first; history: "
    "all tokens before it"
)


class Weighted(Options):
    """The weights of rewards, for transforms that compute returns."""

    discount: float = Field(1.0, gt=0, le=1, description=DISCOUNT)
    outcome_weight: float = Field(1.0, ge=0, le=MOST_WEIGHT, description=OUTCOME_WEIGHT)
    turn_weight: float = Field(1.0, ge=0, le=MOST_WEIGHT, description=TURN_WEIGHT)

    @model_validator(mode="after")
    def _counts_something(self) -> Weighted:
        if not (self.outcome_weight or self.turn_weight):
            raise ValueError("outcome_weight = 0 and turn_weight = 0 leave no reward: set one of them")
        return self


class TurnReturnsOptions(Weighted):
    """`[transform.turn_returns]`"""

    baseline: Literal["others", "state", "group", "none"] = Field(
        "others",
        description="what is subtracted from a return: the mean of the other episodes at the same turn, of the other episodes in "
        "the same state, of all episodes at the same turn, or nothing",
    )
    divide_by_std: bool = Field(
        False, description='with baseline = "group": divide by the standard deviation at that turn'
    )
    state: State = Field("observation", description=f'with baseline = "state": {STATE}')

    @model_validator(mode="after")
    def _check_baseline(self) -> TurnReturnsOptions:
        where = f'with baseline = "{self.baseline}"'
        self.refuse_idle(self.baseline == "group", where, "divide_by_std")
        self.refuse_idle(self.baseline == "state", where, "state")
        return self


class TurnGaeOptions(Weighted):
    """`[transform.turn_gae]`"""

    gae_lambda: float = Field(
        0.95,
        ge=0,
        le=1,
        description="1: returns as they are; 0: only the next turn's mean return counts beyond this turn",
    )


class GigpoOptions(Options):
    """`[transform.gigpo]`"""

    step_weight: float = Field(
        1.0, gt=0, le=MOST_WEIGHT, description="factor of the comparison of turns in the same state"
    )
    discount: float = Field(0.95, gt=0, le=1, description="factor of each later turn's reward, in that comparison")
    divide_by_std: bool = Field(False, description="divide both comparisons by their standard deviation")
    state: State = Field("observation", description=STATE)


class MaxRlOptions(Options):
    """`[transform.maxrl]`"""

    correct_above: float | None = Field(
        None,
        allow_inf_nan=False,
        description="a reward above this is correct; unset: the environment says which replies are correct",
    )
