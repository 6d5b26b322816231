"""Options of the environment `dataset`."""

from __future__ import annotations

import re

from pydantic import Field, field_validator, model_validator

from atropos_core.plugins.option_paths import AbsolutePath
from atropos_core.plugins.options import Options

SCORES = ("numeric", "exact", "math")
OF_THE_HUB = ("subset", "revision", "split", "test_split")


class DatasetOptions(Options):
    tasks: AbsolutePath | None = Field(
        None,
        description="rows: a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a folder of them, or a pattern, data/*.parquet",
    )
    test_tasks: AbsolutePath | None = Field(None, description="the same for the rows that are held out")
    hub: str | None = Field(None, description="or a data set of the Hugging Face hub, such as openai/gsm8k")
    subset: str | None = Field(None, description="subset of the hub's data set, if it has several")
    revision: str | None = Field(None, description="a commit of the hub's data set")
    split: str = Field("train", description="split of the hub's data set to train on")
    test_split: str | None = Field(None, description="split of the hub's data set to hold out")
    held_out: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of the rows, from 0 to 1, to hold out by a hash of their prompts; only if no other rows are held out",
    )
    prompt: str = Field("prompt", description="the column with the prompt: text, or messages. A dot leads into a table")
    answer: str = Field("answer", description="the column with the answer; empty if your own score needs none")
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="leave out rows whose prompt, with the chat template, has more tokens; unset: keep all rows",
    )
    instruction: str = Field("", description="the system message of rows that do not have one")
    score: str = Field(
        "numeric",
        description="1 for a right reply, else 0: numeric compares the reply's last number with the answer, exact the texts, math "
        "the expressions (math-verify). Or your own function, ./grade.py:score",
    )
    pattern: str | None = Field(
        None,
        description="numeric, exact: a regular expression; compare its last match, or the first group of that, instead of the whole "
        "reply",
    )
    leave_out_unreadable: bool = Field(
        False,
        description="numeric, math: leave out rows whose answer the score cannot read, and list them; false: they end the run",
    )
    math_deadline_s: float = Field(5.0, gt=0, description="seconds to compare one pair of expressions")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _agrees(self) -> DatasetOptions:
        if (self.tasks is None) == (self.hub is None):
            raise ValueError(
                'rows come from one of tasks = "train.jsonl", which is `--env dataset:train.jsonl`, and hub = "openai/gsm8k"'
            )
        self.refuse_idle(self.hub is not None, "with tasks: it is for hub", *OF_THE_HUB)
        self.refuse_idle(self.tasks is not None, "with hub, whose own is test_split", "test_tasks")
        self.refuse_idle(
            self.test_tasks is None and self.test_split is None, "with test_tasks or test_split", "held_out"
        )
        if self.score not in SCORES and ":" not in self.score:
            raise ValueError(
                f"score must be one of {', '.join(SCORES)}, or a function such as ./grade.py:score, not {self.score!r}"
            )
        self.refuse_idle(self.score in ("numeric", "exact"), f'with score = "{self.score}"', "pattern")
        self.refuse_idle(self.score in ("numeric", "math"), f'with score = "{self.score}"', "leave_out_unreadable")
        self.refuse_idle(self.score == "math", f'with score = "{self.score}"', "math_deadline_s")
        if self.score in SCORES and not self.answer:
            raise ValueError(f'score = "{self.score}" compares with an answer, and answer = "" says that there is none')
        return self

    def check_files(self) -> None:
        from atropos_env_kit.row_files import check_files

        for path in (self.tasks, self.test_tasks):
            if path is not None:
                check_files(path)
