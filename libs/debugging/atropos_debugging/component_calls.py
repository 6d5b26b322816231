"""Call rewards, transforms and environments on recorded rollouts. The first call that blocks the event loop ends all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from atropos_core.errors import EventLoopBlocked
from atropos_core.interfaces import Reward
from atropos_core.processes.proxies import HostedReward
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.types import Episode, Floats, Score, Task
from atropos_debugging.recorded_groups import NoTokens, NotRecorded

T = TypeVar("T")


class ComponentCalls:
    """Calls of components. After one has blocked the event loop, no other begins: each would block it as long."""

    def __init__(self) -> None:
        self._blocked: EventLoopBlocked | None = None

    async def made(self, name: str, call: Awaitable[T]) -> T:
        """Await a call. Raises EventLoopBlocked with `name` if it, or one before it, blocked the event loop."""
        if self._blocked is not None:
            if isinstance(call, Coroutine):
                call.close()
            raise self._blocked
        try:
            return await call
        except EventLoopBlocked as error:
            self._blocked = EventLoopBlocked(f"{name}: {error}")
            raise self._blocked from None


def scoring_runner(rewards: Sequence[WeightedReward], calls: ComponentCalls) -> RolloutRunner:
    """Return a runner that scores recorded groups. A reward in this process is told by a DataError if it reads what is not recorded; one
    in its own process sees nothing there."""
    scoring = [replace(of, reward=_of_records(of.name, of.reward, calls)) for of in rewards]
    return RolloutRunner.for_scores(scoring, fatal=(EventLoopBlocked,))


def _of_records(name: str, reward: Reward, calls: ComponentCalls) -> Reward:
    if getattr(reward, "of_environment", False):  # it reads recorded scores
        return reward

    async def scored(task: Task, episodes: Sequence[Episode]) -> Floats | Sequence[float | Score]:
        async def call() -> Any:
            if isinstance(reward, HostedReward):
                is_known = not isinstance(task.data, NotRecorded)
                return await reward(task if is_known else replace(task, data={}), episodes)
            return await reward(task, [one if one.rollouts else replace(one, rollouts=NoTokens()) for one in episodes])

        return await calls.made(f"reward {name!r}, task {task.id!r}", call())

    return scored
