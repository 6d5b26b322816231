"""The child's half of `step_process`: episodes by number, each with random state of its own."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

AT_ONCE = 2048  # episodes that are kept; one more lets go of that which was stepped longest ago


class Shown(NamedTuple):
    side: int  # whose action is next
    text: str  # that this side is shown
    rewards: Sequence[float] = ()  # of the step, by side
    ended: bool = False


class HostedEpisode(Protocol):
    def reset(self, seed: int) -> Shown: ...
    def step(self, action: str) -> Shown: ...


class Seeded:
    """An episode, and the random state that it alone sees: what it draws depends on no other."""

    def __init__(self, make: Callable[[], HostedEpisode], seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        self._episode = make()
        self.steps = 0
        self.shown = self._episode.reset(seed)
        self._keep()

    def step(self, action: str) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        self.shown = self._episode.step(action)
        self.steps += 1
        self._keep()

    def _keep(self) -> None:
        self._random, self._numpy = random.getstate(), np.random.get_state()


class StepHost:
    """`make(name, parameters)` makes an episode's environment; `names()` are all that there are."""

    def __init__(self, make: Callable[[str, Mapping[str, Any]], HostedEpisode], names: Callable[[], list[str]]) -> None:
        self._make = make
        self._names = names
        self._episodes: OrderedDict[int, Seeded] = OrderedDict()

    def call(self, method: str, *arguments: Any) -> Any:
        """What a worker is made with."""
        methods: dict[str, Any] = {"names": self._names, "step": self.step}
        return methods[method](*arguments)

    def step(self, source: str, number: int, seed: int, actions: Sequence[str], seen: str) -> dict[str, Any]:
        """What is shown after the last of the actions. Those before it are taken again where the episode is not here; raises
        ValueError where it then shows something else than `seen`."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            wanted = json.loads(source)
            episode = Seeded(lambda: self._make(wanted["name"], wanted["parameters"]), seed)
            for action in actions[:-1]:
                episode.step(action)
            if actions and episode.shown.text != seen:
                raise ValueError(
                    "stepped again from its seed, the episode is another: it draws on more than random state"
                )
        if actions:
            episode.step(actions[-1])
        if not episode.shown.ended:
            self._episodes[number] = episode
            if len(self._episodes) > AT_ONCE:
                self._episodes.popitem(last=False)
        shown = episode.shown
        return {
            "side": shown.side,
            "text": shown.text,
            "rewards": [float(reward) for reward in shown.rewards],
            "ended": shown.ended,
        }
