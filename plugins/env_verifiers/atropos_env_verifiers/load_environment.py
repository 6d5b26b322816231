"""The contract v0: a module whose `load_environment(**arguments)` returns an environment with data sets and a rubric."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import ModuleType
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient
from verifiers.utils.error_utils import ErrorChain

from atropos_env_verifiers.contract import Access, Outcome, Part, numbers, plain

MODEL = "policy"  # any name works


class Chat(OpenAIChatCompletionsClient):  # type: ignore[misc] # verifiers is an Any here
    async def raise_from_native_response(self, response: Any) -> None:
        """Do not raise for an empty reply, as verifiers does: it was sampled, so it is scored."""


class Completions(OpenAICompletionsClient):  # type: ignore[misc]
    async def raise_from_native_response(self, response: Any) -> None:
        """As in `Chat`."""


class LoadEnvironment:
    """An environment of contract v0: its own rollout loop, with one client of ours per rollout, scored as a group by its rubric."""

    name = "v0"
    agents = ("policy",)

    def __init__(self, module: ModuleType, config: Mapping[str, Any]) -> None:
        self._environment: Any = module.load_environment(**config)
        if not isinstance(self._environment, vf.Environment):
            raise TypeError(f"load_environment() gave a {type(self._environment).__name__}, not a vf.Environment")
        self._rows: dict[Part, Any] = {}

    async def open(self, at_most: int) -> dict[Part, list[list[dict[str, Any]]]]:
        environment = self._environment
        if environment.dataset is not None or environment.dataset_source is not None:
            self._rows["train"] = environment.get_dataset()
        if environment.eval_dataset is not None or environment.eval_dataset_source is not None:
            self._rows["eval"] = environment.get_eval_dataset()
        return {
            part: [_messages(prompt) for prompt in rows.select(range(min(at_most, len(rows))))["prompt"]]
            for part, rows in self._rows.items()
        }

    async def run(self, part: Part, index: int, accesses: Sequence[Mapping[str, Access]]) -> list[Outcome]:
        environment, row = self._environment, self._rows[part][index]
        clients = [self._client(access["policy"]) for access in accesses]
        works = (
            environment.rollout(deepcopy(row), client, MODEL, deepcopy(environment.sampling_args)) for client in clients
        )
        try:
            states = await asyncio.gather(*works, return_exceptions=True)
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        outcomes = [Outcome(agent="policy", error=_error_of(state)) for state in states]
        whole = [(state, outcome) for state, outcome in zip(states, outcomes, strict=True) if isinstance(state, dict)]
        for state, outcome in whole:
            outcome.turns = step_rewards(state["trajectory"])
        scored = [state for state, outcome in whole if not outcome.error]
        if scored:
            score = environment.rubric.score_group
            await (score if environment.score_rollouts else environment.rubric.dummy_score_group)(scored)
        for state, outcome in whole:
            await environment.rubric.cleanup(state)
            if not outcome.error:
                self._fill(outcome, state)
        return outcomes

    def _fill(self, outcome: Outcome, state: Mapping[str, Any]) -> None:
        found = numbers((state["metrics"] or {}).items())
        weights = self._weights()
        outcome.score = float(state["reward"])
        outcome.parts = {name: value * weights[name] for name, value in found.items() if weights.get(name)}
        outcome.metrics = {name: value for name, value in found.items() if not weights.get(name)}
        outcome.metrics["turns"] = float(len(state["trajectory"]))

    def _weights(self) -> dict[str, float]:
        """Weights by function name. A name with several weights has none, since verifiers reports the sum of its values."""
        found: dict[str, set[float]] = defaultdict(set)
        rubrics = [self._environment.rubric]
        for rubric in rubrics:
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                found[function.__name__].add(float(weight))
            rubrics += rubric.rubrics if isinstance(rubric, vf.RubricGroup) else []
        return {name: weights.pop() for name, weights in found.items() if len(weights) == 1}

    def _client(self, access: Access) -> Client[Any, Any, Any, Any]:
        """A client without retries: a reply that is sampled twice would be trained twice."""
        client = AsyncOpenAI(base_url=access.url, api_key=access.key, max_retries=0, timeout=None)
        return Completions(client) if self._environment.message_type == "completion" else Chat(client)

    async def close(self) -> None:
        """Does nothing: the environment registers its own teardown for the end of its process."""


def step_rewards(trajectory: Sequence[Mapping[str, Any]]) -> list[float] | None:
    """Return the reward of each step, 0 for one without, or None if no step has one. To be called before the episode is scored: a rubric
    then gives every step without a reward that of the episode."""
    given = [step.get("reward") for step in trajectory]
    return None if all(one is None for one in given) else [0.0 if one is None else float(one) for one in given]


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return plain([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _error_of(state: Any) -> str:
    if isinstance(state, BaseException):
        if not isinstance(state, Exception):
            raise state
        return f"{type(state).__name__}: {state}"
    error = state["error"]
    return "" if error is None else repr(ErrorChain(error))
