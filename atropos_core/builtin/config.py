"""Options of the built-in components."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from atropos_core.plugins.provider import Options


class ExactOptions(Options):
    strip: bool = True  # leading and trailing white space does not count
    ignore_case: bool = False


class NumericOptions(Options):
    tolerance: float = Field(1e-6, ge=0)  # relative to the answer, or absolute where that is below 1


class FormatOptions(Options):
    patterns: tuple[str, ...] = (r"\\boxed\{[^{}]+\}|####\s*\S",)  # regular expressions, searched in the last reply


class LengthOptions(Options):
    free_tokens: int = Field(64, ge=0)  # up to here the reward is 0
    limit_tokens: int = Field(256, ge=1)  # from here on it is -1, linear between


class GroupAdvantageOptions(Options):
    baseline: Literal["group", "others", "none"] = "group"  # the mean of the group, of its others (RLOO), or nothing
    divide_by_std: bool | None = None  # with baseline = "group" alone; unset: True there. False: Dr.GRPO

    @model_validator(mode="after")
    def _only_the_group_is_divided(self) -> GroupAdvantageOptions:
        if self.divide_by_std and self.baseline != "group":
            raise ValueError(
                f'divide_by_std goes with baseline = "group", and it is "{self.baseline}": remove one of them'
            )
        return self

    def announced(self) -> dict[str, str | bool]:
        """What a transform before it may ask: which common offset or factor of the rewards ends here."""
        return {"baseline": self.baseline, "divided": self.baseline == "group" and self.divide_by_std is not False}


class JsonlOptions(Options):
    rollouts_every: int = Field(1, ge=0)  # steps; 0: never write rollouts


class ToyEngineOptions(Options):
    latency_s: float = Field(0.0, ge=0)  # what each call takes


class RemoteEngineOptions(Options):
    url: str  # of `atropos engine` on another machine, like http://10.0.0.5:8001
    token_file: Path | None = None


class ToyTrainerOptions(Options):
    learning_rate: float = Field(1.0, gt=0)
