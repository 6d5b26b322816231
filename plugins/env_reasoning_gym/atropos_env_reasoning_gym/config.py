"""Options of the environment `reasoning_gym`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from atropos_core.plugins.options import Options

Form = Literal["tag", "marked", "whole"]
INSTRUCTIONS: dict[Form, str] = {
    "tag": "Think first. Then give the answer alone between <answer> and </answer>.",
    "marked": "Think first. Then give the answer alone on the last line, after ####.",
    "whole": "Reply with the answer alone.",
}


class ReasoningGymOptions(Options):
    dataset: str | None = Field(None, description="a data set of reasoning-gym, such as chain_sum")
    mixture: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="several data sets, each with its weight: its share of the tasks"
    )
    parameters: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="by data set: options of its configuration besides seed and size"
    )
    levels: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="levels of the data sets' own curricula to make tasks at, in equal parts; 0 is the easiest; none: "
        "the data sets' defaults. Each task carries its level as `level`, which a curriculum's prior can read",
    )
    tasks: int = Field(2000, ge=1, description="size of the training split; all tasks are made when the run begins")
    held_out: int = Field(200, ge=1, description="size of the test split")
    seed: int = Field(0, ge=0, description="seed of the tasks")
    answer: Form = Field(
        "tag",
        description="part of a reply that is its answer. tag: between the last <answer> and </answer>; marked: the line after "
        "the last ####; whole: the whole reply",
    )
    instruction: str | None = Field(
        None, description="the system message; empty for none. Unset: one that asks for what `answer` reads"
    )
    scoring_deadline_s: float = Field(10.0, gt=0, description="seconds to score one answer; after that it scores 0")
    making_deadline_s: float = Field(120.0, gt=0, description="seconds to make one task")

    @model_validator(mode="after")
    def _one_kind(self) -> ReasoningGymOptions:
        if (self.dataset is None) == (not self.mixture):
            raise ValueError("give dataset, or a mixture of several with their weights: one of the two")
        if stray := sorted(set(self.parameters) - set(self.weights)):
            raise ValueError(f"parameters.{stray[0]} has no effect: {stray[0]} is not among the data sets")
        for name, parameters in self.parameters.items():
            if own := sorted({"seed", "size"} & set(parameters)):
                raise ValueError(f"parameters.{name}.{own[0]} is set by the run: remove it")
        return self

    @property
    def weights(self) -> dict[str, float]:
        return dict(self.mixture) if self.dataset is None else {self.dataset: 1.0}

    @property
    def system(self) -> str:
        return INSTRUCTIONS[self.answer] if self.instruction is None else self.instruction
