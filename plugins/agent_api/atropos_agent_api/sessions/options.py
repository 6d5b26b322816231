"""What a session may be told about how its calls are answered and trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from atropos_agent_api.calls import Call
from atropos_core.errors import ConfigError

TrainedCalls = Callable[[Call], bool]  # whether what is sampled for a call is trained


def all_calls(call: Call) -> bool:
    return True


def calls_with_tools(call: Call) -> bool:
    """A call without tools is an auxiliary one of many agents: a title, a summary."""
    return bool(call.tools)


def calls_of_agent(name: str) -> TrainedCalls:
    """Of the agent that says this name of itself (`hints["agent"]`)."""

    def is_trained(call: Call) -> bool:
        return call.hints.get("agent", "") == name

    return is_trained


def trained_calls(option: str) -> TrainedCalls:
    """What "all", "with_tools" and "agent:NAME" mean. Raises ConfigError for anything else."""
    if option == "all":
        return all_calls
    if option == "with_tools":
        return calls_with_tools
    if option.startswith("agent:") and option.removeprefix("agent:"):
        return calls_of_agent(option.removeprefix("agent:"))
    raise ConfigError(
        f"trained calls {option!r} are not known.",
        remedy='Say "all", "with_tools", or "agent:NAME" with the name that the agent gives itself.',
    )


@dataclass(frozen=True)
class SessionOptions:
    """`history`: "as_sampled" extends what was sampled, reasoning too; "as_sent" renders what the client sends, and forks
    where that is not what was sampled. `client_sampling`: what becomes of a temperature, top_p, top_k or seed that is not
    the run's. A bound of 0 is none."""

    history: Literal["as_sampled", "as_sent"] = "as_sampled"
    client_sampling: Literal["overrule", "refuse"] = "overrule"
    trained_calls: TrainedCalls = all_calls
    max_calls: int = 0
    max_sampled_tokens: int = 0  # of all calls together
    context_tokens: int = 0  # of a prompt and its reply together
