"""The contract v1: a `Taskset` of tasks that score their traces, and an `Env` whose agents run them by a `Harness`.

An agent's harness gets the address and key of verifiers' own interception server, which passes each call on unchanged to our
address and key.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import islice
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.env import RunSlot
from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig
from verifiers.v1.utils.loaders import env_config_type, load_environment

from atropos_env_verifiers.contract import Access, Outcome, Part, numbers, plain

MODEL = "policy"  # any name works


class TasksetEnvironment:
    """An environment of contract v1: its own episodes, with a client of ours for each agent that does not have one."""

    name = "v1"

    def __init__(self, id: str, config: Mapping[str, Any]) -> None:
        self._environment: Any = load_environment(_configured(id, config))
        self._declared = agent_config_fields(self._environment.config)
        self.agents = [name for name, agent in self._declared.items() if agent.client is None]
        self._tasks: list[Any] = []
        self._open = AsyncExitStack()

    async def open(self, at_most: int) -> dict[Part, list[list[dict[str, Any]]]]:
        await self._open.enter_async_context(self._environment.serving())
        self._tasks = list(islice(self._environment.taskset, at_most))
        return {"train": [_messages(task.data) for task in self._tasks]}

    async def run(self, part: Part, index: int, accesses: Sequence[Mapping[str, Access]]) -> list[Outcome]:
        return list(await asyncio.gather(*(self._run(self._tasks[index], access) for access in accesses)))

    async def _run(self, task: Any, accesses: Mapping[str, Access]) -> Outcome:
        environment = copy.copy(self._environment)
        # A separate server for the episode: a shared one would keep a client of every episode forever.
        vars(environment)["_interception"] = None
        with _variables([access.key for access in accesses.values()]) as names:
            clients = {
                agent: EvalClientConfig(base_url=access.url, api_key_var=name)
                for (agent, access), name in zip(accesses.items(), names, strict=True)
            }
            changed = {
                agent: self._declared[agent].model_copy(update={"client": client}) for agent, client in clients.items()
            }
            environment.config = environment.config.model_copy(update=changed)
            context = ModelContext(MODEL, next(iter(clients.values()), EvalClientConfig()))
            episode = await environment.run_slot(RunSlot(task), context)
        return _outcome(episode, self.agents)

    async def close(self) -> None:
        await self._open.aclose()


def _configured(id: str, config: Mapping[str, Any]) -> Any:
    """The configuration. If neither the environment nor `config` says where programs run, they run as processes on this machine:
    verifiers' own default is a remote service."""
    given = {**config, "taskset": {**config.get("taskset", {}), "id": id}}
    kind = env_config_type(id, given.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(agent := field.default, AgentConfig) and isinstance(agent.runtime, PrimeConfig):
            given[name] = {"runtime": SubprocessConfig().model_dump(), **given.get(name, {})}
    return kind.model_validate(given)


@contextmanager
def _variables(keys: Sequence[str]) -> Iterator[list[str]]:
    """Names of environment variables that hold these keys: a client's configuration cannot hold a key itself. Programs that are
    started do not inherit variables named API_KEY."""
    names = [f"ATROPOS_API_KEY_{secrets.token_hex(8)}" for _ in keys]
    os.environ.update(zip(names, keys, strict=True))
    try:
        yield names
    finally:
        for name in names:
            del os.environ[name]


def _messages(data: Any) -> list[dict[str, Any]]:
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if data.prompt is None or isinstance(data.prompt, str):
        prompt = [{"role": "user", "content": data.prompt or data.description or data.name or f"task {data.idx}"}]
    else:
        prompt = [message.model_dump() for message in data.prompt]
    return plain([*system, *prompt])


def _outcome(episode: Any, agents: Sequence[str]) -> Outcome:
    trained = [trace for trace in episode.traces if trace.agent.trainable and trace.agent.name in agents]
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if not episode.ok:
        error = (
            f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        )  # later errors follow from the first
        return Outcome(agent=trained[0].agent.name if trained else "", error=error)
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        return Outcome(error=f"an episode may have one trained agent run, and this one has {len(trained)} ({names})")
    [trace] = trained
    return Outcome(
        score=trace.reward,
        parts=numbers((name, reward.value) for name, reward in trace.rewards.items() if reward is not None),
        metrics=numbers(trace.metrics.items()) | {"turns": float(trace.num_turns), "timeouts": float(trace.is_timeout)},
        agent=trace.agent.name,
    )
