"""The environment `textarena`: games in which every side is the policy.

A group of n rollouts is n sides, from as many games as needed. Each side is a separate episode, with its own tokens and score.
"""

from __future__ import annotations

from collections.abc import Sequence

from atropos_core.conversation import Policy
from atropos_core.seeds import derive
from atropos_core.types import Episode, Failed, Task
from atropos_env_kit.step_process import StepProcess
from atropos_env_kit.stepping import Match, Stepped, SteppedEnvironment, run_matches
from atropos_env_textarena.config import TextarenaOptions


class Textarena(SteppedEnvironment):
    def __init__(self, options: TextarenaOptions) -> None:
        super().__init__(options.game, options)
        self._players = options.players
        parameters = {**options.parameters, "players": options.players}
        self._process = StepProcess("atropos_env_textarena.episodes:call", options.game, parameters, options)

    async def open(self) -> None:
        await self._process.open("textarena", "players of [environment.NAME], at [environment.NAME.parameters]")

    def stepped(self) -> Stepped:
        return self._process.stepped()

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        """Run games until the group has its episodes. If a game ends before a side's first turn, further games supply the
        missing ones. A game that fails, fails for all of its sides."""
        found: list[Episode | Failed | BaseException] = []
        games = 0
        while len(found) < n:
            missing = -(-(n - len(found)) // self._players)
            matches = [
                Match(self.stepped(), policy, self.reader, seed=derive(seeds[0], "game", games + at))
                for at in range(missing)
            ]
            games += missing
            for outcome in await run_matches(matches, [task.data["seed"]] * missing):
                found += [outcome] * self._players if isinstance(outcome, BaseException) else outcome
        return found[:n]

    async def close(self) -> None:
        await super().close()
        await self._process.close()
