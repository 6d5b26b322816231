"""The child's side of `step_process`: episodes by number, each with its own random state."""

from __future__ import annotations

import json
import random
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from atropos_core.errors import AtroposError

OF_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
NO_ACTIONS_FAULT = (OSError, MemoryError, ImportError, NotImplementedError, AtroposError)  # OSError: but for OF_PATHS
MOST_SHOWN = 1000  # characters of an error that the policy is shown
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
    """An episode with its own random state, so that its draws do not depend on other episodes."""

    def __init__(self, make: Callable[[], HostedEpisode], seed: int) -> None:
        self._make = make
        self._seed = seed
        self._taken: list[str] = []
        self.raised = ""  # by the last step; empty for nothing
        self.shown = self._begin()
        self._last = self.shown  # the last that the environment itself showed

    def step(self, action: str) -> None:
        """Take an action. If the environment raises on it, take an empty action instead, because the environment has its own rule
        for replies without an action. If it also raises on that, take nothing, show the error, and give no reward. Raises errors
        that no action caused."""
        side = self._last.side
        error = self._taken_or_raised(action)
        if error is None:
            self.shown, self.raised = self._last, ""
            return
        said = f"error: {type(error).__name__}: {error}"[:MOST_SHOWN]
        of_empty = self._taken_or_raised("")
        if of_empty is not None:
            self.shown, self.raised = Shown(side, said), f"{_site(error)}; on an empty action too"
            return
        self.raised = _site(error)
        text = f"{said}\n{self._last.text}" if self._last.side == side else self._last.text
        self.shown = self._last._replace(text=text)

    def _begin(self) -> Shown:
        random.seed(self._seed)
        np.random.seed(self._seed)
        self._episode = self._make()
        shown = self._episode.reset(self._seed)
        self._keep()
        return shown

    def _taken_or_raised(self, action: str) -> Exception | SystemExit | None:
        """Return None if the action was taken, else the environment's error. The episode is then as it was before."""
        try:
            self._take(action)
        except (Exception, SystemExit) as error:  # an environment may run an action as a program, which exits
            if isinstance(error, NO_ACTIONS_FAULT) and not isinstance(error, OF_PATHS):
                raise
            self._begin_again()
            return error
        return None

    def _take(self, action: str) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        self._last = self._episode.step(action)
        self._taken.append(action)
        self._keep()

    def _begin_again(self) -> None:
        """Make the episode again and repeat its actions, because the step that raised may have left half of its changes. Raises
        ValueError if the result differs."""
        last, taken, self._taken = self._last, self._taken, []
        self._last = self._begin()
        for action in taken:
            self._take(action)
        if self._last != last:
            raise ValueError("stepped again from its seed, the episode is another: it draws on more than random state")

    def _keep(self) -> None:
        self._random, self._numpy = random.getstate(), np.random.get_state()


def _site(error: BaseException) -> str:
    """Return an error's type, and the file and line that raised it."""
    [frame] = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} in {'/'.join(frame.filename.split('/')[-2:])}, line {frame.lineno}"


class StepHost:
    """`make(name, parameters)` makes an episode's environment; `names()` returns all names."""

    def __init__(self, make: Callable[[str, Mapping[str, Any]], HostedEpisode], names: Callable[[], list[str]]) -> None:
        self._make = make
        self._names = names
        self._episodes: OrderedDict[int, Seeded] = OrderedDict()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; a worker is made with this function."""
        methods: dict[str, Any] = {"names": self._names, "step": self.step}
        return methods[method](*arguments)

    def step(self, source: str, number: int, seed: int, actions: Sequence[str], seen: str) -> dict[str, Any]:
        """Return what is shown after the last of the actions. If the episode is not here, take the earlier ones again; raises
        ValueError if it then shows something other than `seen`."""
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
            "raised": episode.raised,
        }
