"""Options of the transforms `zscore`, `length_penalty` and `equal_group`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from atropos_core.plugins.options import Options


class ZScoreOptions(Options):
    """`[transform.zscore]`"""

    scope: Literal["environment", "global"] = Field(
        "environment", description="separate statistics for each environment, or the same for all"
    )
    center: bool = Field(True, description="subtract the mean")
    scale: bool = Field(True, description="divide by the standard deviation")
    half_life: float | None = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="samples after which an earlier one has half its weight; unset: all count alike",
    )
    warm_up: int = Field(100, ge=2, description="rewards stay unchanged until the scope has this many samples")
    clip: float | None = Field(
        5.0, gt=0, allow_inf_nan=False, description="largest deviation from the mean, in standard deviations"
    )

    @model_validator(mode="after")
    def _does_something(self) -> ZScoreOptions:
        if not (self.center or self.scale or self.clip):
            raise ValueError(
                "center = false, scale = false and no clip leave every reward as it is: set one of them, or leave the "
                "transform out"
            )
        return self


class LengthPenaltyOptions(Options):
    """`[transform.length_penalty]`"""

    form: Literal["group", "token"] = Field(
        "group", description="compare with the shortest and longest reply of the group, or charge a price per token"
    )
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description='form = "group": factor on what the length adds or takes'
    )
    cost: float | None = Field(
        None, gt=0, allow_inf_nan=False, description='form = "token": price of each sampled token'
    )
    free_tokens: int = Field(0, ge=0, description='form = "token": tokens that cost nothing')
    correct_above: float | None = Field(
        None,
        allow_inf_nan=False,
        description='form = "group": a reward above this counts as correct; unset: the environment says which replies are correct',
    )

    @model_validator(mode="after")
    def _check_form(self) -> LengthPenaltyOptions:
        if self.form == "token" and self.cost is None:
            raise ValueError('form = "token" has no price: set cost, the reward that one token takes')
        other = {"group": ("cost", "free_tokens"), "token": ("weight", "correct_above")}[self.form]
        if wrong := self.changed(*other):
            raise ValueError(f'{wrong[0]} belongs to the other form, but form is "{self.form}": remove one of them')
        return self


class EqualGroupOptions(Options):
    """`[transform.equal_group]`"""

    free_tokens: int = Field(128, ge=0, description="replies up to this length lose nothing")
    limit_tokens: int = Field(256, ge=1, description="replies from this length on lose `weight`; linear in between")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="the most that a reply loses")
    correct_above: float | None = Field(
        None,
        allow_inf_nan=False,
        description="a reward above this is correct; unset: the environment says which replies are correct",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> EqualGroupOptions:
        if self.free_tokens >= self.limit_tokens:
            raise ValueError(
                f"free_tokens = {self.free_tokens} must be below limit_tokens = {self.limit_tokens}: between them the "
                "penalty grows"
            )
        return self
