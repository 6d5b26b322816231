"""Options of the environment `gem`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from atropos_env_kit.stepping import SteppingOptions


class GemOptions(SteppingOptions):
    id: str = Field(description="of an environment that gem has registered, such as game:GuessTheNumber-v0")
    parameters: dict[str, Any] = Field(default_factory=dict, description="what gem.make takes besides the id")
