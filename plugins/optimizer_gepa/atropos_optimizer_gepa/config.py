"""The options of `[trainer]` with `use = "gepa"`, and of an environment with `use = "prompted"`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from atropos_core.config.component import Component
from atropos_core.plugins.options import Options


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class PromptedOptions(Options):
    environment: Annotated[Component, BeforeValidator(_named)] = Field(
        description="the environment that gives the tasks: its name, or a table with `use` and its options"
    )
    prompt: str = Field("", description="the first prompt of the run; without a trainer 'gepa', the only one")
    place: Literal["user", "system"] = Field(
        "user", description="before the user's first message, or as a separate system message"
    )
    separator: str = Field("\n\n", description='between the prompt and the user\'s message, with place = "user"')

    @model_validator(mode="after")
    def _check_effect(self) -> PromptedOptions:
        self.refuse_idle(self.place == "user", 'with place = "system"', "separator")
        return self


class GepaOptions(Options):
    proposer: str = Field(
        "reflect",
        description="writer of the next prompt: reflect (a model at `url` that reads rollouts and rewards), first_words, or your "
        "coroutine function, ./file.py:function",
    )
    url: str | None = Field(
        None, description="for reflect: an OpenAI-compatible address, such as http://127.0.0.1:8000/v1"
    )
    model: str = Field("default", description="for reflect: the model's name there")
    key_variable: str = Field(
        "OPENAI_API_KEY", description="for reflect: the environment variable with its key, if it needs one"
    )
    examples: int = Field(6, ge=1, description="rollouts for the proposer: those with the lowest and highest rewards")
    deadline_s: float = Field(300.0, gt=0, description="for one proposal")

    @model_validator(mode="after")
    def _agrees(self) -> GepaOptions:
        reflects = self.proposer == "reflect"
        if reflects and self.url is None:
            raise ValueError(
                'proposer = "reflect" asks a model, but no url is set: give its address, url = "http://HOST:PORT/v1"'
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f'url = "{self.url}" is not an address: start it with http:// or https://')
        self.refuse_idle(reflects, f"with proposer = {self.proposer!r}", "url", "model", "key_variable")
        return self
