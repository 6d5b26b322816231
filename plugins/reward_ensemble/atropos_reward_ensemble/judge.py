"""The reward `judge`: a separate model reads the question and the reply, and gives a number."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_core.builtin.numbers import plain
from atropos_core.builtin.rewards import last_reply
from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Reward
from atropos_core.types import Episode, Floats, Metrics, Task
from atropos_reward_ensemble.config import JudgeOptions
from atropos_reward_ensemble.judge_model import JudgeModel
from atropos_reward_ensemble.missing import MissingRatings


class Judge(Reward):
    """0 at `low`, 1 at `high`. Equal requests are sent once: within a group, and as long as they are in the cache."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        self._score = re.compile(options.score)
        self._model = JudgeModel(options, self.read)
        self._cache: OrderedDict[str, float] = OrderedDict()
        self._episodes = self._cached = self._missing = 0  # since the last metrics()

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        """[G]. Raises MissingRatings, which carries the ratings that there are."""
        bodies = [self._body(task, last_reply(episode)) for episode in episodes]
        keys = [hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() for body in bodies]
        known = {key: value for key in set(keys) if (value := self._remembered(key)) is not None}
        new = {key: body for key, body in zip(keys, bodies, strict=True) if key not in known}
        answers = dict(zip(new, await asyncio.gather(*(self._ask(body) for body in new.values())), strict=True))
        for key, answer in answers.items():
            if isinstance(answer, float):
                self._remember(key, answer)
        ratings = [known.get(key, answers.get(key)) for key in keys]
        causes = [str(rating) for rating in ratings if not isinstance(rating, float)]
        self._episodes += len(keys)
        self._cached += len(keys) - len(new)
        self._missing += len(causes)
        values = np.array([rating if isinstance(rating, float) else np.nan for rating in ratings])
        if causes:
            raise MissingRatings(f"judge {self._options.model!r}", values, causes)
        return values.astype(np.float32)

    def read(self, text: str) -> float:
        """The score in a judge's answer, 0 to 1. Raises ValueError if there is none."""
        found = self._score.findall(plain(text))  # a colon, digits and a minus sign of any script
        if not found:
            raise ValueError(f"its answer has no score in it: {text[-200:]!r}")
        try:
            number = float(found[-1])
        except ValueError:
            raise ValueError(f"its score {found[-1]!r} is not a number") from None
        low, high = self._options.low, self._options.high
        if not low <= number <= high:
            raise ValueError(f"its score {number:g} is not between {low:g} and {high:g}")
        return (number - low) / (high - low)

    async def _ask(self, body: Mapping[str, Any]) -> float | str:
        try:
            return await within(self._model.ask(body), self._options.give_up_s, "the judge, all tries together,")
        except (DataError, DeadlineExceeded) as error:
            return str(error)

    def _body(self, task: Task, reply: str) -> dict[str, Any]:
        options = self._options
        if "{answer}" in options.prompt and task.answer is None:
            raise DataError(f"the judge's prompt has {{answer}} in it, and task {task.id!r} has none")
        given = {
            "question": "\n\n".join(str(one.get("content") or "") for one in task.messages if one["role"] == "user"),
            "reply": reply,
            "answer": task.answer or "",
            "low": f"{options.low:g}",
            "high": f"{options.high:g}",
        }
        # One pass, so that a reply that says {answer} is shown as it is. A policy may sample half a surrogate pair: not UTF-8.
        prompt = re.sub(r"\{(\w+)\}", lambda found: given[found[1]], options.prompt)
        prompt = prompt.encode("utf-8", "replace").decode()
        system = [{"role": "system", "content": options.system}] if options.system else []
        return {
            "model": options.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }

    def _remembered(self, key: str) -> float | None:
        value = self._cache.get(key)
        if value is not None:
            self._cache.move_to_end(key)
        return value

    def _remember(self, key: str, value: float) -> None:
        self._cache[key] = value
        while len(self._cache) > self._options.cache:
            self._cache.popitem(last=False)

    def metrics(self) -> Metrics:
        episodes = max(self._episodes, 1)
        metrics = {"missing": self._missing / episodes, "cached": self._cached / episodes, **self._model.metrics()}
        self._episodes = self._cached = self._missing = 0
        return metrics

    def state(self) -> Mapping[str, Any]:
        """The requests and tokens used from the budget. The cache starts empty."""
        return self._model.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._model.load(state)

    async def close(self) -> None:
        await self._model.close()
