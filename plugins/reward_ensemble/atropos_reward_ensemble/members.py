"""One member of an ensemble, called with a deadline, in this process or another. Any failure there is a missing rating."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.errors import ConfigError
from atropos_core.guards.deadlines import within
from atropos_core.guards.open_component import opened
from atropos_core.interfaces import Reward
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import START_DEADLINE_S, Child
from atropos_core.processes.proxies import HostedReward
from atropos_core.turn_rewards import split_scores
from atropos_core.types import Episode, Task
from atropos_reward_ensemble.config import EnsembleOptions
from atropos_reward_ensemble.missing import MissingRatings, Ratings


class EnsembleMember:
    """`ask` gives ratings [G], NaN for missing ones, and the cause (empty if none is missing). It raises only ConfigError, for a
    mistake in the run file."""

    def __init__(self, name: str, reward: Reward, deadline_s: float, named: str) -> None:
        """`named`: its name in errors of `open`."""
        self.name = name
        self._named = named
        self.reward = reward
        self._deadline_s = deadline_s
        self._queued = 0  # calls on a process that have not ended

    @property
    def queues(self) -> bool:
        return bool(getattr(self.reward, "queues", False))

    async def open(self) -> None:
        """Start the member. Raises the errors of starting it."""
        await opened(self._named, self.reward)

    async def ask(self, task: Task, episodes: Sequence[Episode]) -> tuple[Ratings, str]:
        nothing = np.full(len(episodes), np.nan)
        deadline_s = self._deadline_s
        if isinstance(self.reward, HostedReward):  # it has the deadline itself; one call at a time, each may take it
            deadline_s = START_DEADLINE_S + self._deadline_s * (1 + self._queued)
        self._queued += 1
        try:
            answer = await within(self.reward(task, episodes), deadline_s, f"reward {self.name!r}")
            given = np.asarray(split_scores(answer, episodes)[0], np.float64)  # an ensemble combines totals
        except MissingRatings as error:
            return np.where(np.isfinite(error.ratings), error.ratings, np.nan), str(error)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the plugin boundary: another reward's code
            first = next(iter(str(error).splitlines()), "")
            return nothing, f"{type(error).__name__}: {first}"
        finally:
            self._queued -= 1
        if given.shape != (len(episodes),):
            return nothing, f"it gave shape {given.shape} for {len(episodes)} episodes"
        if not np.isfinite(given).all():
            return np.where(np.isfinite(given), given, np.nan), f"it gave {given.tolist()}: not all finite"
        return given, ""

    async def close(self) -> None:
        close = getattr(self.reward, "close", None)
        if close is not None:
            await close()


def build(name: str, options: EnsembleOptions, context: RunContext) -> EnsembleMember:
    """Build the member here, or prepare it to start in a separate process. Raises the errors of building it."""
    member, chosen = options.members[name], options.chosen(name)
    ensemble = context.label.removeprefix("reward.")
    named = f"reward {'.'.join(filter(None, (ensemble, name)))!r}"
    if (member.runs_in or chosen.offer.provider.runs_in) == "here":
        return EnsembleMember(name, chosen.build(context), member.deadline_s, named)

    async def start() -> Child:
        (context.directory / "logs").mkdir(exist_ok=True)
        return await chosen.start(context, f"reward-{name}", 1)

    return EnsembleMember(name, HostedReward(start, member.deadline_s, named), member.deadline_s, named)
