"""An environment written for atroposlib, as a run sees it. Its code runs in a separate process, which asks this one for samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.conversation import Policy
from atropos_core.errors import ConfigError, DataError, ProcessDied, RemoteError
from atropos_core.group_schema import check_metric_name
from atropos_core.interfaces import Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.child import Child
from atropos_core.rollouts.stop_texts import end_at_stop, first_tokens
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive
from atropos_core.types import Completion, Episode, Failed, Metrics, Sampling, Split, Task, Tokens
from atropos_env_atroposlib.matching import Matcher, Sampled
from atropos_env_atroposlib.options import AtroposlibOptions
from atropos_env_kit.numbered_tasks import NumberedTasks

EVALUATION = "evaluation"
COLLECT_DEADLINE_S = 24 * 3600.0  # the run's own deadline of a rollout is shorter
NUMBERS = (
    EVALUATION,
    "accuracy",
    "percent_correct",
    "correct",
    "score",
    "reward",
)  # names that the one number of an evaluation may have


@dataclass
class Collected:
    """One call of the environment's code: the policy that it samples from, and everything that was sampled."""

    policy: Policy
    seed: int
    calls: int = 0
    sampled: Sampled = field(default_factory=Sampled)


def _named(metric: str) -> str:
    """The metric's name as the environment logged it, changed if the run has a metric of that name."""
    try:
        check_metric_name(metric)
    except DataError:
        return f"environment_{metric}"
    return metric


def item(number: int) -> Task:
    return Task(f"item-{number}", ({"role": "user", "content": f"item {number} of the environment's own stream"},))


class AtroposlibEnvironment(Environment):
    repeats = False

    def __init__(self, options: AtroposlibOptions, context: RunContext) -> None:
        """Raises ConfigError if the run promises something that a stream of items cannot keep."""
        if context.deterministic:
            raise ConfigError(
                "a run with an environment of atroposlib cannot be deterministic: its items are a stream, and its code decides "
                "what happens between samples.",
                remedy="Leave --deterministic out.",
            )
        self._options = options
        self._context = context
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._calls: dict[int, Collected] = {}
        self._numbers = 0
        self._surplus: list[list[Episode | Failed]] = []  # groups beyond the requested one
        self._step = 0
        self._state: dict[str, Any] | None = None
        self._loaded = True  # False until the process has loaded a resumed run's state
        self._says: dict[str, Any] = {}
        self._metrics: Metrics = {}
        self._warned: set[str] = set()
        self._tokenizer = ChatTokenizer(context.model, context.today)
        self._matcher = Matcher(self._tokenizer.decode)

    # -- what a run calls

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of "train" are numbers. "test" is its evaluate() as one task."""
        if split == "train":
            return NumberedTasks(self._options.items, item)
        return [Task(EVALUATION, ({"role": "user", "content": "the environment's own evaluate()"},))][
            : int(self._options.evaluates)
        ]

    def source(self) -> str:
        return f"{Path(self._options.file).name}, items as they come"

    async def open(self) -> None:
        """Start the process and load the environment's data there."""
        await self._running()

    async def rollout_group(
        self, task: Task, policy: Policy, n: int, *, seeds: Sequence[int]
    ) -> Sequence[Episode | Failed | BaseException]:
        """The environment's next group: one that it gave earlier, or one of its next item."""
        if task.id == EVALUATION:
            return [await self._evaluate(policy, seeds[0])] * n
        if self._surplus:
            return self._filled(self._surplus.pop(0), n)
        number, call = self._call(policy, seeds[0])
        try:
            index = int(task.id.removeprefix("item-"))
            answer = await self._request("collect", number, index, n, self._step, self._options.tries)
            groups = [self._matcher.episodes(group, call.sampled) for group in answer["groups"]]
        finally:
            del self._calls[number]
        self._say_unmatched()
        if not groups:
            raise DataError(f"the environment gave no group for {self._options.tries} items in turn (option tries)")
        parts = [group[at : at + n] for group in groups for at in range(0, len(group), n)]
        self._surplus += [part for part in parts[1:] if len(part) > 1]
        return self._filled(parts[0], n)

    def metrics(self) -> Metrics:
        """Values that the environment logged since the last step, and how its sequences were matched."""
        found, self._metrics = self._metrics, {}
        return found | {f"sequences_{name}": float(count) for name, count in vars(self._matcher.counts).items()}

    def state(self) -> Mapping[str, Any]:
        """The data that its save_checkpoint() wrote with its last group."""
        return {"step": self._step, "data": self._state}

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep the state, which the process loads at its next call."""
        self._step, self._state = int(state["step"]), state["data"]
        self._loaded = False

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    # -- its process

    async def _running(self) -> Child:
        async with self._starting:
            if self._child is not None and self._child.peer.lost.is_set():
                console.warn(f"{self._child.role} has ended, and is started again: {Path(self._options.file).name}")
                await self._child.close()
                self._child = None
            if self._child is None:
                self._child = await self._start()
            elif not self._loaded:
                await self._child.peer.call("load", self._step, self._state, deadline_s=self._options.open_deadline_s)
            self._loaded = True
            return self._child

    async def _start(self) -> Child:
        options, context = self._options, self._context
        role = f"environment-{context.label.rpartition('.')[2] or 'atroposlib'}"
        logs = context.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        wanted = {
            "place": options.file,
            "config": options.config,
            "datasets": options.datasets,
            "policy_urls": options.policy_urls,
            "model": str(context.model),
            "today": context.today,
            "tables": str(logs / f"{role}-tables.jsonl"),
        }
        child = await Child.start(
            role,
            wanted,
            logs / f"{role}.log",
            threads=1,
            program="atropos_env_atroposlib.host",
            patience=context.patience,
        )
        child.peer.handlers["sample"] = self._sample
        try:
            self._says = await child.peer.call("open_environment", deadline_s=options.open_deadline_s)
            if self._step or self._state is not None:
                await child.peer.call("load", self._step, self._state, deadline_s=options.open_deadline_s)
        except BaseException:
            await child.close()
            raise
        return child

    async def _request(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call the process. If it ends, also while it starts, only this rollout fails: the next call starts it again."""
        try:
            child = await self._running()
            answer: dict[str, Any] = json.loads(
                await child.peer.call(method, *arguments, deadline_s=COLLECT_DEADLINE_S)
            )
        except ProcessDied as error:
            raise RemoteError(Exception.__str__(error), remedy=error.remedy) from error
        self._metrics |= answer["metrics"]
        self._state = answer["state"]
        for url in answer["clients"]:
            self._warn_once(
                f"{Path(self._options.file).name} opened an OpenAI client for {url}: the policy answers it."
            )
        return answer

    # -- what its code calls

    def _call(self, policy: Policy, seed: int) -> tuple[int, Collected]:
        self._numbers += 1
        call = self._calls[self._numbers] = Collected(policy, seed)
        return self._numbers, call

    async def _sample(
        self, number: int, prompt: Tokens, n: int, settings: Mapping[str, Any], stops: Sequence[str]
    ) -> list[Completion]:
        call = self._calls.get(number)
        if call is None:
            raise DataError("the group that this sample is for has ended")
        seed, call.calls = derive(call.seed, call.calls), call.calls + 1
        found = await call.policy.sample(prompt, n=n, sampling=self._sampling(call.policy, settings), seed=seed)
        made = [await self._cut(one, stops) for one in found]
        for one in made:
            call.sampled.add(prompt, one)
            self._step = max(self._step, int(one.policy_version.max(initial=0)))
        return made

    def _sampling(self, policy: Policy, settings: Mapping[str, Any]) -> Sampling:
        """The file's settings, or the run's own for those that it leaves open. Never more tokens than the run allows a reply."""
        usual = policy.sampling
        most = min(int(settings.get("max_tokens", usual.max_tokens)), usual.max_tokens)
        return replace(
            usual,
            max_tokens=most,
            temperature=float(settings.get("temperature", usual.temperature)),
            top_p=float(settings.get("top_p", usual.top_p)),
            top_k=max(int(settings.get("top_k", usual.top_k)), 0),
            min_p=float(settings.get("min_p", usual.min_p)),
        )

    async def _cut(self, completion: Completion, stops: Sequence[str]) -> Completion:
        """Cut the completion after the first token that completes a stop text."""

        async def text(tokens: Tokens) -> str:
            return self._tokenizer.decode(tokens, keep_special=True)

        size, stop = await end_at_stop(completion.tokens, stops, text) if stops else (0, "")
        return first_tokens(completion, size) if stop else completion

    # -- results

    async def _evaluate(self, policy: Policy, seed: int) -> Episode | Failed:
        number, call = self._call(policy, seed)
        try:
            answer = await self._request("evaluate", number, self._step)
        finally:
            del self._calls[number]
        metrics = {_named(name.removeprefix("eval/")): float(value) for name, value in answer["metrics"].items()}
        if not call.sampled.histories:
            raise DataError("evaluate() asked the policy for nothing: set evaluates = false for this environment")
        score = next((metrics[name] for part in NUMBERS for name in metrics if part in name), 0.0)
        return Episode(call.sampled.rollouts(), score, metrics=metrics)

    def _filled(self, episodes: list[Episode | Failed], n: int) -> Sequence[Episode | Failed]:
        missing = Failed(f"the environment gave {len(episodes)} of {n} sequences", "rollout_group")
        return [*episodes[:n], *[missing] * (n - len(episodes))]

    def _say_unmatched(self) -> None:
        if self._matcher.counts.without_logprobs:
            self._warn_once(
                f"{Path(self._options.file).name} gives sequences that match nothing that was sampled, by ids or by text: they are "
                "trained without logprobs, as if sampled from the present policy. The metric sequences_without_logprobs counts them."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            console.warn(text)
