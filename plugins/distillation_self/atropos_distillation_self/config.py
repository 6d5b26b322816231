"""The options of `[teacher.NAME]` with `use = "self"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from atropos_core.config.component import ComponentOnDevices
from atropos_core.plugins.provider import Options

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent


class SelfOptions(Options):
    shows: tuple[Literal["sibling", "answer", "feedback"], ...] = Field(
        ("sibling", "feedback"),
        description="shown if available: a right reply of the group, the task's answer, what the environment said "
        "in the rollout itself; empty: only the template, for all",
    )
    success: float = Field(1.0, allow_inf_nan=False, description="smallest reward of a right sibling")
    template: str = Field(
        "{problem}\n\n{shown}\n\nWith this in mind, solve the problem from its beginning.",
        description="replaces the task's last user message; {problem} is that message, {shown} what is shown",
    )
    solution: str = Field("A correct solution:\n{shown}", description="how a sibling's reply or the answer is shown")
    feedback: str = Field("An earlier attempt was told:\n{shown}", description="how feedback is shown")
    versions_behind: int = Field(
        0, ge=0, description="versions that it may be behind the policy; 0 needs checkpoint.every = 1"
    )
    top_k: int = Field(16, ge=1, description="likeliest tokens given at each position for forward distillation")
    engine: ComponentOnDevices = Field(
        default_factory=lambda: ComponentOnDevices(use="hf"),
        description="the engine it runs on, in a separate process: use, devices, threads, and its options",
    )
    deadline_s: float = Field(600.0, gt=0, description="seconds for all groups of one step, including loading weights")

    @model_validator(mode="after")
    def _agrees(self) -> SelfOptions:
        for name in ("template", "solution", "feedback"):
            try:
                has = "\0" in getattr(self, name).format(problem="", shown="\0")
            except (ValueError, KeyError, IndexError) as error:
                raise ValueError(f"{name} cannot be filled in: {type(error).__name__}: {error}") from error
            if has != bool(self.shows) and (name == "template" or not has):
                raise ValueError(f"{name} {'lacks' if self.shows else 'has'} {{shown}}, and shows = {list(self.shows)}")
        return self

    def resolved_engine(self) -> ResolvedComponent:
        """Raises as for an [engine] of the run file."""
        from atropos_core.config.resolve import inner  # what a list of plugins does without

        return inner("engine", "teacher.engine", self.engine)
