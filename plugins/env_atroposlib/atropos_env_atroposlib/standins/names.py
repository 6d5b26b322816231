"""Types that environment files annotate with."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Content = str | list[Any]
Item = Any
number = int | float
UUID = str


class Message(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: float | None


class AgentStep(TypedDict, total=False):
    step: int
    messages: list[Message]
    reward: float


class Observation(TypedDict):
    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


AgentHistory = dict[str, list[AgentStep]]
GameHistory = list[GameStep]
EvaluationConfigGeneral = dict[str, Any]
EvaluationResults = dict[str, Any]
EvaluationMetrics = dict[str, Any]
EvaluationSample = dict[str, Any]
