"""A component as a run file names it: `use` and its options. Imports nothing heavy, because plugins whose options name other
components load this module to be listed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from atropos_core.plugins.options import NoBooleanIsANumber


class Component(NoBooleanIsANumber):
    """`use` names the component; every other key is one of its own options."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    use: str = Field(description="name of the component, or a reference to code: pkg.mod:Name, ./file.py:Name")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Weighted(Component):
    weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="weight relative to the others of its kind")


class RewardComponent(Weighted):
    deadline_s: float = Field(60.0, gt=0, description="seconds for scoring one group")
    runs_in: Literal["here", "process"] | None = Field(
        None,
        description="process: in a child process; here: in the run's own process; unset: the component's own default",
    )


class GoldOptions(NoBooleanIsANumber):
    """Makes a reward the gold reward of a run: it is measured and never trained on."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    share: float = Field(
        0.02, gt=0, le=1, description="share of the training tasks, from 0 to 1, whose rollouts the gold reward scores"
    )
    hold_back: bool = Field(True, description="leave these tasks out of training; false: the other rewards train them")


class RunReward(RewardComponent):
    gold: GoldOptions | None = Field(
        None, description="if given, this is the gold reward: it is never trained on, and checks the rewards that are"
    )


class ComponentOnDevices(Component):
    devices: tuple[str, ...] = Field(
        ("auto",),
        min_length=1,
        description="cpu, cuda:0 and so on; auto: the first CUDA device, or the CPU. Several if the component can span "
        "devices",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads; unset: one per 4 million parameters of the model, at most one per core",
    )


class TrainerComponent(ComponentOnDevices):
    machines: int = Field(
        1,
        ge=1,
        description="number of machines, each with these devices; more than 1 requires a launcher that provides machines",
    )
