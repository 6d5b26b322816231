"""Options of the environment `dataset`."""

from __future__ import annotations

import re
from math import isfinite

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
    score: str | tuple[str, ...] = Field(
        "numeric",
        description="1 for a right reply, else 0: numeric compares the reply's last number with the answer, exact the texts, math "
        "the expressions (math-verify). Or your own function, ./grade.py:score. Several, in a list, are added up",
    )
    score_weights: tuple[float, ...] = Field(
        (), description="several scores: the weight of each, in their order; unset: 1 each"
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
        scores, there = set(self.scores), f"with score = {self.score!r}".replace("'", '"')
        if wrong := [one for one in self.scores if one not in SCORES and ":" not in one]:
            raise ValueError(
                f"score must be one of {', '.join(SCORES)}, or a function such as ./grade.py:score, not {wrong[0]!r}"
            )
        if not scores or len(scores) < len(self.scores):
            raise ValueError(f"score must be a list of different scores, not {list(self.scores)}")
        self.refuse_idle(len(scores) > 1, there, "score_weights")
        if self.score_weights and len(self.score_weights) != len(self.scores):
            raise ValueError(f"score_weights has {len(self.score_weights)} numbers for {len(self.scores)} scores")
        if not all(map(isfinite, self.score_weights)):
            raise ValueError(f"score_weights must be finite numbers, not {list(self.score_weights)}")
        self.refuse_idle(bool(scores & {"numeric", "exact"}), there, "pattern")
        self.refuse_idle(bool(scores & {"numeric", "math"}), there, "leave_out_unreadable")
        self.refuse_idle("math" in scores, there, "math_deadline_s")
        if self.compared and not self.answer:
            raise ValueError(
                f'score = "{self.compared[0]}" compares with an answer, and answer = "" says that there is none'
            )
        return self

    def check_files(self) -> None:
        from atropos_env_kit.row_files import check_files

        for path in (self.tasks, self.test_tasks):
            if path is not None:
                check_files(path)

    @property
    def scores(self) -> tuple[str, ...]:
        return (self.score,) if isinstance(self.score, str) else self.score

    @property
    def compared(self) -> tuple[str, ...]:
        """Its scores that compare a reply with the answer."""
        return tuple(one for one in self.scores if one in SCORES)
