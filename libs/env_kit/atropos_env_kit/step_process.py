"""Episodes that are stepped in a child process, for environments whose steps block or share Python's random state.

The process is a cache: an episode is its seed and its actions. If the process loses one, because another one's step hung or it was
killed, the episode is stepped again from its seed. It fails if the result differs from what was seen.
"""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Mapping
from itertools import count
from typing import Any

from atropos_core import console
from atropos_core.errors import ConfigError, RemoteError
from atropos_core.types import Message
from atropos_env_kit.function_worker import Worker
from atropos_env_kit.stepping import Stepped, SteppingOptions, Turn, raised_on_action

NAMES_DEADLINE_S = 60.0


class StepProcess:
    """Episodes of one environment, by name, in one process."""

    def __init__(self, function: str, name: str, parameters: Mapping[str, Any], options: SteppingOptions) -> None:
        """`function`: the `call` of a `step_host.StepHost`. The deadline of a step also applies to making an environment."""
        self._name = name
        self._source = json.dumps({"name": name, "parameters": dict(parameters)})
        self._deadline_s = options.step_deadline_s
        self._numbers = count()
        self._calls: set[asyncio.Future[Any]] = set()
        self._told: set[str] = set()
        self._worker = Worker(function, environment={"PYTHONHASHSEED": "0"})

    async def open(self, of: str, options: str) -> None:
        """Make an environment, and begin an episode. Raises ConfigError if that fails.

        of: the environment's package
        options: where its options are in a run file, for the error
        """
        try:
            await self.stepped().reset(0)
        except RemoteError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip(" *")]
            said = " ".join(lines[: 1 + "".join(lines[:1]).endswith(":")])  # what nltk raises begins with a frame
            known = await self._worker.call("names", deadline_s=NAMES_DEADLINE_S)
            if self._name in known:
                raise ConfigError(
                    f"{of} makes no {self._name} with these options: {said}",
                    remedy=f"Check {options}, and what else that environment needs to be installed.",
                ) from error
            near = difflib.get_close_matches(self._name, known, n=3, cutoff=0.4)
            hint = (
                f"Did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"There are {len(known)}, such as {known[0]}."
            )
            raise ConfigError(f"{of} has no environment {self._name!r}.", remedy=hint) from error

    def stepped(self) -> Stepped:
        """Return one more episode."""
        return _SteppedThere(self, next(self._numbers))

    async def step(self, number: int, seed: int, actions: list[str], seen: str) -> dict[str, Any]:
        """Take the last of the actions. If the caller is cancelled, the process finishes the step: ending it would cost all other
        episodes."""
        work = asyncio.ensure_future(
            self._worker.call("step", self._source, number, seed, actions, seen, deadline_s=self._deadline_s)
        )
        self._calls.add(work)
        work.add_done_callback(self._forget)
        found: dict[str, Any] = await asyncio.shield(work)
        if found["raised"] and found["raised"] not in self._told:
            self._told.add(found["raised"])
            console.warn(raised_on_action(self._name, found["raised"]))
        return found

    def _forget(self, work: asyncio.Future[Any]) -> None:
        self._calls.discard(work)
        _ = work.cancelled() or work.exception()  # the caller may be gone

    async def close(self) -> None:
        calls = [*self._calls]
        for work in calls:
            work.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._worker.close()


class _SteppedThere(Stepped):
    def __init__(self, process: StepProcess, number: int) -> None:
        self._process = process
        self._number = number
        self._seed = 0
        self._actions: list[str] = []
        self._seen = ""

    async def reset(self, seed: int) -> Turn:
        self._seed = seed
        return await self._go_on()

    async def step(self, reply: Message, action: str) -> Turn:
        self._actions.append(action)
        return await self._go_on()

    async def _go_on(self) -> Turn:
        found = await self._process.step(self._number, self._seed, self._actions, self._seen)
        self._seen = found["text"]
        return Turn(
            found["side"],
            ({"role": "user", "content": found["text"]},),
            found["rewards"],
            ended=found["ended"],
            raised=found["raised"],
        )

    async def close(self) -> None:
        """Let the process drop this episode, and in time those that were never closed."""
