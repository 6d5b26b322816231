"""Options of a session: how its calls are answered and trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from atropos_agent_api.calls import Call

TrainedCalls = Callable[[Call], bool]  # True if what is sampled for the call is trained


def all_calls(call: Call) -> bool:
    return True


def trained_calls(
    which: Literal["all", "main", "with_tools"], agents: Collection[str] = (), untrained_models: Collection[str] = ()
) -> TrainedCalls:
    """Return a function that is true for calls that are trained: all, or those with tools (many agents make calls without tools for
    titles and summaries). If `agents` are given, only calls whose agent gives one of these names (`hints["agent"]`). Never a call
    for a model of `untrained_models`, which the agent chooses before it sees an answer."""

    def is_trained(call: Call) -> bool:
        if call.model in untrained_models:
            return False
        return (which != "with_tools" or bool(call.tools)) and (not agents or call.hints.get("agent") in agents)

    return is_trained


@dataclass(frozen=True)
class SessionOptions:
    """`history`: "as_sampled" extends what was sampled, with the reasoning; "as_sent" renders what the client sends, and forks if
    that differs. `client_sampling`: overrule or refuse a temperature, top_p, top_k or seed that is not the run's. A bound of 0
    means no bound."""

    history: Literal["as_sampled", "as_sent"] = "as_sampled"
    client_sampling: Literal["overrule", "refuse"] = "overrule"
    trained_calls: TrainedCalls = all_calls
    only_main: bool = False  # do not train calls outside the task (`side_calls.py`)
    max_calls: int = 0
    max_sampled_tokens: int = 0  # of all calls together
    context_tokens: int = 0  # of a prompt and its reply together
