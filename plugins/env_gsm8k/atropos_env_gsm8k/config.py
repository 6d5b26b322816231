"""Options of the environment `gsm8k`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options

INSTRUCTION = (
    "Solve the problem step by step. End with the final number on a line of its own, after ####, or inside \\boxed{}."
)


class Gsm8kOptions(Options):
    source: Literal["generated", "path", "hub"] = Field(
        "generated", description="source of the problems: generated from `seed`, a folder, or the Hugging Face hub"
    )
    path: AbsolutePath | None = Field(
        None, description='source = "path": a folder with train.jsonl and test.jsonl in GSM8K\'s schema'
    )
    dataset: str = Field("openai/gsm8k", description='source = "hub": id of the data set')
    revision: str | None = Field(None, description='source = "hub": a commit of that data set')
    problems: int = Field(1_000_000, ge=1, description='source = "generated": size of the training split')
    held_out: int = Field(10_000, ge=1, description='source = "generated": size of the test split')
    seed: int = Field(0, ge=0, description='source = "generated": seed of the problems')
    instruction: str = Field(INSTRUCTION, description="the system message; empty for none")
    grading: Literal["strict", "lenient"] = Field(
        "strict", description="which of the two gradings is the score; both are reported"
    )
    grading_deadline_s: float = Field(5.0, gt=0, description="seconds to compare one pair of expressions")

    @model_validator(mode="after")
    def _check_path(self) -> Gsm8kOptions:
        if (self.path is not None) != (self.source == "path"):
            raise ValueError('path and source = "path" go together')
        where = f'with source = "{self.source}"'
        self.refuse_idle(self.source == "hub", f'{where}: it is for source = "hub"', "dataset", "revision")
        self.refuse_idle(
            self.source == "generated", f'{where}: it is for source = "generated"', "problems", "held_out", "seed"
        )
        return self

    def check_files(self) -> None:
        if self.path is not None:
            from atropos_env_gsm8k.data import check_folder

            check_folder(self.path)
