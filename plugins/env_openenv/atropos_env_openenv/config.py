"""Options of the environment `openenv`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from atropos_env_kit.stepping import SteppingOptions


class OpenenvOptions(SteppingOptions):
    url: str = Field(description="of a server that runs: http://127.0.0.1:8000")
    field: str | None = Field(None, description="of the server's actions that takes what a reply does, such as message")
    fields: dict[str, Any] = Field(default_factory=dict, description="further fields of every action")
    tools: bool = Field(
        False,
        description="the policy calls the server's own tools, in place of `field`; a reply that calls none ends the episode",
    )
    shown: str | None = Field(
        None, description="the field of an observation that is shown; unset: all of them, as JSON"
    )
    sessions: int = Field(16, ge=1, description="episodes at once; fewer where the server says that it holds fewer")
    connect_deadline_s: float = Field(
        10.0, gt=0, description="seconds for a connection, and for a server that has ended to be back"
    )

    @field_validator("url")
    @classmethod
    def _is_of_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url is {url!r}: it begins with http://, https://, ws:// or wss://")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _one_kind_of_action(self) -> OpenenvOptions:
        if self.tools == (self.field is not None):
            raise ValueError("give field, which takes what a reply does, or tools = true: one of the two")
        self.refuse_idle(not self.tools, "with tools", "fields", "action", "pattern", "template")
        return self
