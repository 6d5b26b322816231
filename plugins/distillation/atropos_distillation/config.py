"""The options of `[teacher.NAME]` with `use = "distillation"` or `use = "self"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from atropos_core.config.component import ComponentOnDevices
from atropos_core.plugins.options import Options

if TYPE_CHECKING:
    from atropos_core.config.resolve import ResolvedComponent

TOP_K = 16


class TeacherOptions(Options):
    model: str | None = Field(
        None, description="the teacher, like `model` of a run: a directory, a name on the hub, tiny-teacher"
    )
    engine: ComponentOnDevices = Field(
        default_factory=lambda: ComponentOnDevices(use="hf"),
        description="the engine it runs on, in a separate process: use, devices, threads, and its options",
    )
    url: str | None = Field(
        None, description="instead of an engine: an OpenAI-compatible server with prompt_logprobs (vLLM)"
    )
    served_model: str | None = Field(None, description="the teacher's name on that server; unset: its first model")
    tokenizer: str | None = Field(
        None, description="with url: the teacher's tokenizer, named like `model`, to compare with the policy's"
    )
    key_variable: str = Field("ATROPOS_TEACHER_KEY", description="with url: the environment variable with its key")
    top_k: int | None = Field(
        None,
        ge=0,
        description=f"likeliest tokens given at each position; 0: only the sampled token. Unset: {TOP_K} for "
        "forward distillation, 0 for reverse",
    )
    environments: tuple[str, ...] = Field((), description="score only groups of these; empty: all")
    sequences_at_once: int = Field(64, ge=1, description="in one call of its engine, or as requests to the server")
    deadline_s: float = Field(600.0, gt=0, description="seconds for all groups of one step")

    @model_validator(mode="after")
    def _agrees(self) -> TeacherOptions:
        if (self.model is None) == (self.url is None):
            raise ValueError("a teacher needs either a model, which runs here, or the url of a server")
        if self.url is not None:
            if self.tokenizer is None:
                raise ValueError(
                    "url needs tokenizer: a directory with the teacher's tokenizer.json, which must equal the policy's"
                )
            if urlsplit(self.url).scheme not in ("http", "https"):
                raise ValueError(f"url must begin with http:// or https://, but is {self.url!r}")
            if self.changed("engine"):
                raise ValueError("engine runs a model here, but url names a server: remove one of them")
        else:
            if wrong := self.changed("served_model", "tokenizer", "key_variable"):
                raise ValueError(f"{wrong[0]} applies to a server, but model runs here: remove one of them")
            self.resolved_engine()
        return self

    def resolved_engine(self) -> ResolvedComponent:
        """Raises as for an [engine] of the run file."""
        from atropos_core.config.resolve import inner  # what a list of plugins does without

        return inner("engine", "teacher.engine", self.engine)

    def requests_of(self, kind: Any) -> int:
        """`top_k` if the trainer distils in this way ("forward", "reverse", or not known)."""
        if self.top_k is not None:
            return self.top_k
        return 0 if kind == "reverse" else TOP_K


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
