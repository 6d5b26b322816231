"""Options of the environment `textarena`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from atropos_env_kit.stepping import SteppingOptions


class TextarenaOptions(SteppingOptions):
    game: str = Field(description="that textarena has registered, without -raw or -train: TicTacToe-v0")
    players: int = Field(2, ge=1, description="of the game; all of them are the policy")
    parameters: dict[str, Any] = Field(default_factory=dict, description="what textarena.make takes besides the game")
