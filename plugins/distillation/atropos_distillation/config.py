"""The options of `[teacher.NAME]` with `use = "distillation"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from atropos_core.config.component import ComponentOnDevices
from atropos_core.plugins.provider import Options

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent

TOP_K = 16


class TeacherOptions(Options):
    model: str | None = Field(
        None, description="the teacher, as `model` of a run names one: a directory, a name of the hub, tiny-teacher"
    )
    engine: ComponentOnDevices = Field(
        default_factory=lambda: ComponentOnDevices(use="hf"),
        description="what it runs on, in a process of its own: use, devices, threads, and its options",
    )
    url: str | None = Field(
        None, description="in place of an engine here: an OpenAI-compatible server that answers prompt_logprobs (vLLM)"
    )
    served_model: str | None = Field(
        None, description="the name under which that server has it; unset: its first model"
    )
    tokenizer: str | None = Field(
        None, description="with url: where the teacher's tokenizer is, as `model`, to be compared with the policy's"
    )
    key_variable: str = Field(
        "ATROPOS_TEACHER_KEY", description="with url: the environment variable that holds its key"
    )
    top_k: int | None = Field(
        None,
        ge=0,
        description=f"likeliest tokens that it tells of each position; 0: the sampled token alone. Unset: {TOP_K} for "
        "forward distillation, 0 for reverse",
    )
    environments: tuple[str, ...] = Field((), description="annotate the groups of these alone; empty: of all")
    sequences_at_once: int = Field(64, ge=1, description="in one call of its engine, or as requests to the server")
    deadline_s: float = Field(600.0, gt=0, description="for all groups of one step")

    @model_validator(mode="after")
    def _agrees(self) -> TeacherOptions:
        if (self.model is None) == (self.url is None):
            raise ValueError(
                "a teacher needs a model, which runs here, or the url of a server that has it: one of the two"
            )
        if self.url is not None:
            if self.tokenizer is None:
                raise ValueError(
                    "url needs tokenizer: a directory with the teacher's tokenizer.json, which must be the policy's own"
                )
            if urlsplit(self.url).scheme not in ("http", "https"):
                raise ValueError(f"url must begin with http:// or https://, and is {self.url!r}")
            if self.changed("engine"):
                raise ValueError("engine is what a model runs on here, and url is a server's: remove one of them")
        else:
            if wrong := self.changed("served_model", "tokenizer", "key_variable"):
                raise ValueError(f"{wrong[0]} is of a server, and model runs here: remove one of them")
            self.resolved_engine()
        return self

    def resolved_engine(self) -> ResolvedComponent:
        """Raises as for an [engine] of the run file."""
        from atropos_core.config.resolve import inner  # what a list of plugins does without

        return inner("engine", "teacher.engine", self.engine)

    def requests_of(self, kind: Any) -> int:
        """`top_k`, where the trainer distils in this way ("forward", "reverse", or not known)."""
        if self.top_k is not None:
            return self.top_k
        return 0 if kind == "reverse" else TOP_K
