"""Options of the five curricula."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from atropos_core.plugins.options import Options

GROUPS = 15  # quantile bins of prior difficulty, at most
Share = Annotated[float, Field(ge=0, le=1)]


class Prior(Options):
    """What the data set says about the tasks before the first draw: one number for each."""

    field: str | None = Field(None, description="field of `Task.data` with one number for each task")
    file: str | None = Field(
        None, description="file: .npy, or text with a number per line; {environment} in it is the environment's name"
    )
    meaning: Literal["difficulty", "success"] = Field(
        "difficulty", description="difficulty: higher is harder; success: a rate from 0 to 1"
    )
    bins: int = Field(
        8, ge=1, le=GROUPS, description="quantiles of the tasks; a task never tried has the estimate of its bin"
    )
    read: int | Literal["all"] = Field(10_000, description="tasks whose field is read before the first draw")
    read_ahead: int = Field(4, ge=0, description="further tasks to read with each draw that is settled")

    @model_validator(mode="after")
    def _one_source(self) -> Prior:
        if (self.field is None) == (self.file is None):
            raise ValueError("a prior is read from a field of the tasks' data or from a file: give one of the two")
        if self.read != "all" and self.read < 1:
            raise ValueError('read is "all" or a number of tasks of at least 1')
        self.refuse_idle(self.file is None, "with file, which is read completely", "read", "read_ahead")
        self.refuse_idle(self.read != "all", 'with read = "all", which leaves nothing to read ahead', "read_ahead")
        return self


class CurriculumOptions(Options):
    """The options that all five share."""

    prior: Prior | None = Field(None, description="what is known of the tasks before the first draw; unset: nothing")
    success: Literal["auto", "correct", "reward"] = Field(
        "auto", description="what of an episode counts; auto: `correct` if every episode has it, else the reward"
    )
    reward_range: tuple[float, float] = Field(
        (0.0, 1.0), description="a reward that counts as failure, and one that counts as success"
    )
    memory: float = Field(
        0.3, ge=0, lt=1, description="share of a task's evidence, from 0 to 1, that remains after its next visit"
    )
    prior_weight: float = Field(
        0.25, gt=0, description="number of rollouts for which the estimate of a task's bin counts"
    )
    explore: Share = Field(0.1, description="share of the draws, from 0 to 1, that is uniform over all tasks")

    @model_validator(mode="after")
    def _range_rises(self) -> CurriculumOptions:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range must rise from failure to success, and {list(self.reward_range)} does not")
        self.refuse_idle(
            self.success != "correct", 'with success = "correct", which does not look at rewards', "reward_range"
        )
        return self


class EasyFirstOptions(CurriculumOptions):
    solved: float = Field(0.9, gt=0, le=1, description="a task with more success than this gives way to harder ones")
    sharpness: float = Field(4.0, ge=0, description="weight of the hardest against the easiest task: exp(-sharpness)")


class CompetenceOptions(CurriculumOptions):
    draws: int = Field(2000, ge=1, description="settled draws until every task may be drawn: T of the schedule")
    start: float = Field(0.1, gt=0, le=1, description="share of the tasks, the easiest, that may be drawn at first: c0")
    solved: float = Field(0.9, gt=0, le=1, description="a task with more success than this is left to `explore`")


class LearningProgressOptions(CurriculumOptions):
    slow: float = Field(
        0.5,
        gt=0,
        le=1,
        description="without a prior: rate of the slow average of a task's success; the fast one is its estimate",
    )
    power: float = Field(
        2.0, gt=0, description="exponent of the progress; a task's weight is proportional to the result"
    )
    floor: float = Field(0.04, gt=0, description="smallest progress that a task is assumed to have")
    explore: Share = Field(0.2, description="share of the draws, from 0 to 1, that is uniform over all tasks")

    @model_validator(mode="after")
    def _check_prior(self) -> LearningProgressOptions:
        where = "with a prior, whose bins are then used to measure progress"
        self.refuse_idle(self.prior is None, where, "slow", "memory", "prior_weight")
        if self.prior is not None:
            self.prior.refuse_idle(False, "on learning_progress, which does not use which bins are harder", "meaning")
        return self


class PrioritizedOptions(CurriculumOptions):
    power: float = Field(1.0, ge=0, description="alpha of Schaul et al.: 0 is uniform")
    floor: float = Field(0.02, gt=0, description="priority of a task that never or always succeeds; the highest is 1")


class WindowOptions(CurriculumOptions):
    low: Share = Field(0.2, description="a task stays in the pool while its success is above this")
    high: Share = Field(0.8, description="and while it is below this")
    explore: Share = Field(
        0.1,
        description="share of the draws, from 0 to 1, of tasks outside the pool, to see if they belong there now",
    )

    @model_validator(mode="after")
    def _check_window(self) -> WindowOptions:
        if not self.low < self.high:
            raise ValueError(
                f"the window keeps low < success < high, and low = {self.low} is not below high = {self.high}"
            )
        return self
