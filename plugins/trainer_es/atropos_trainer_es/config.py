"""The options of `[trainer]` with `use = "es"`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from atropos_core.plugins.options import Options


class EsOptions(Options):
    """A generation takes `population` + 1 steps of the run: one samples from the policy itself, and one from each member."""

    population: int = Field(30, ge=2, multiple_of=2, description="members of a generation: pairs of +noise and -noise")
    sigma: float = Field(1e-3, gt=0, allow_inf_nan=False, description="the standard deviation of the noise on a weight")
    learning_rate: float = Field(5e-4, ge=0, allow_inf_nan=False, description="times the mean of fitness x noise")
    fitness: Literal["z", "rank"] = Field(
        "z", description="of the members' rewards: z-scores, or ranks spread evenly from -0.5 to 0.5"
    )
    parameters: str = Field("", description="a regular expression for names of perturbed parameters; empty: all")

    @field_validator("parameters")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from error
        return value
