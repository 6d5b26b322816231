"""Options of the environment `openenv`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from atropos_env_kit.stepping import SteppingOptions


class OpenenvOptions(SteppingOptions):
    url: str = Field(description="URL of a running server, such as http://127.0.0.1:8000")
    field: str | None = Field(
        None, description="field of the server's actions that takes the policy's action, such as message"
    )
    fields: dict[str, Any] = Field(default_factory=dict, description="further fields of every action")
    tools: bool = Field(
        False,
        description="the policy calls the server's own tools instead of filling `field`; a reply without a call ends the episode",
    )
    shown: str | None = Field(None, description="field of an observation to show; unset: all of them, as JSON")
    sessions: int = Field(16, ge=1, description="most episodes at once; fewer if the server holds fewer sessions")
    connect_deadline_s: float = Field(
        10.0, gt=0, description="seconds to connect, and to wait for a server that has ended to be back"
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url = {url!r} must begin with http://, https://, ws:// or wss://")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_action_kind(self) -> OpenenvOptions:
        if self.tools == (self.field is not None):
            raise ValueError("give field, which takes the policy's action, or tools = true: one of the two")
        self.refuse_idle(not self.tools, "with tools", "fields", "action", "pattern", "template")
        return self
