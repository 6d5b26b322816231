"""Options of the built-in components."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from atropos_core.plugins.options import Options


class ExactOptions(Options):
    strip: bool = Field(True, description="leading and trailing white space does not count")
    ignore_case: bool = Field(False, description="upper and lower case are the same")


class NumericOptions(Options):
    tolerance: float | None = Field(
        None,
        ge=0,
        description="relative to the answer, or absolute if that is below 1. Unset, whole numbers are compared exactly and others within a "
        "millionth",
    )


class FormatOptions(Options):
    patterns: tuple[str, ...] = Field(
        (r"\\boxed\{[^{}]+\}|####\s*\S",),
        description="regular expressions, searched in the last reply: in its reasoning too, if they name a thinking tag such as <think>",
    )


class LengthOptions(Options):
    free_tokens: int = Field(64, ge=0, description="up to here the reward is 0")
    limit_tokens: int = Field(256, ge=1, description="from here on it is -1, linear between")


class GroupAdvantageOptions(Options):
    baseline: Literal["group", "others", "none"] = Field(
        "group", description="what is subtracted from a reward: the mean of the group, of its others (RLOO), or nothing"
    )
    divide_by_std: bool | None = Field(
        None,
        description='divide by the group\'s standard deviation; false: Dr.GRPO. Unset: true with baseline = "group", '
        "which only that baseline may have",
    )

    @model_validator(mode="after")
    def _check_division(self) -> GroupAdvantageOptions:
        if self.divide_by_std and self.baseline != "group":
            raise ValueError(
                f'divide_by_std goes with baseline = "group", and it is "{self.baseline}": remove one of them'
            )
        return self

    def announced(self) -> dict[str, Any]:
        """Announce the baseline, and which common changes of a group's rewards have no effect here, each with the option that gives it
        one."""
        divided = self.baseline == "group" and self.divide_by_std is not False
        undoes = {"offset": 'baseline = "none"'} if self.baseline != "none" else {}
        undoes |= {"factor": "divide_by_std = false"} if divided else {}
        return {"by": "group_advantage", "baseline": self.baseline, "undoes": undoes}


class JsonlOptions(Options):
    rollouts_every: int = Field(1, ge=0, description="steps between two whose rollouts are written; 0: never")
    tokens: bool = Field(True, description="beside the texts: ids, logprobs, masks, versions, advantages")
    tokens_max_mb: float = Field(
        2000, gt=0, description="megabytes of tokens, of all steps together: beyond it, those of the oldest are removed"
    )

    @model_validator(mode="after")
    def _refuse_idle_options(self) -> JsonlOptions:
        self.refuse_idle(
            self.rollouts_every > 0, "where rollouts_every = 0 records no rollouts", "tokens", "tokens_max_mb"
        )
        self.refuse_idle(self.tokens, "where tokens = false records none", "tokens_max_mb")
        return self


class ToyEngineOptions(Options):
    latency_s: float = Field(0.0, ge=0, description="seconds that each call takes")


class ToyTrainerOptions(Options):
    learning_rate: float = Field(1.0, gt=0, description="of its one update a batch")
