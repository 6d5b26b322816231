"""Clients run in environments of their own; what they are tested against is ours: the environment `agent` and its API."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_agent_api.config import AgentOptions
from atropos_agent_api.environment.agent import Agent
from atropos_agent_api.environment.build import build
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.types import Draw, Sampling, ScoredGroup
from plugins.agent_api.tests.models import qwen_like
from tests.agents.clients import CLIENTS, Client
from tests.agents.scripted import ScriptedEngine

HERE = Path(__file__).parent
TASK = '{"prompt": "Write the product of 6 and 7 into answer.txt.", "answer": "42"}\n'
DEADLINE_S = 200.0
Made = Callable[..., AbstractAsyncContextManager["Trial"]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a client whose environment the suite does not name is skipped."""
    named = os.environ.get("AGENT_CLIENTS", "").split(":")
    for item in items:
        if HERE not in item.path.parents or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        environment = CLIENTS[item.callspec.params["name"]].environment
        if environment not in named:
            item.add_marker(pytest.mark.skip(reason=f"needs {environment}: `make test-agents` installs it"))


class Trial:
    """A client as the program of an environment, and the engine that answers it."""

    def __init__(self, agent: Agent, engine: ScriptedEngine, runner: RolloutRunner, directory: Path) -> None:
        self.agent, self.engine, self.runner, self._directory = agent, engine, runner, directory

    def records(self) -> list[list[dict[str, Any]]]:
        """Of each episode the calls, as the run's directory has them."""
        files = sorted(self._directory.glob("agents/client/*/account.json"))
        return [json.loads(file.read_text())["calls"] for file in files]

    async def group(self, n: int) -> ScoredGroup:
        """Of `n` episodes of the one task, as a run makes it."""
        draw = Draw(0, "agent", "train", 0, seed=1)
        return await self.runner.run(draw, self.runner.schedule_keys(draw, n), n, Sampling(max_tokens=400))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    @asynccontextmanager
    async def make(client: Client, *, waits_in_turn: int = 0, **options: Any) -> AsyncIterator[Trial]:
        tokenizer = qwen_like(tmp_path / "model")
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text(TASK)
        given = {
            **client.options, "tasks": str(tasks), "held_out": 0.0, "on_failure": "fail",
            "reward": {"function": "tests.agents.grade:grade"}, "limits": {"wall_s": DEADLINE_S - 20}, **options,
        }  # fmt: skip
        context = RunContext(tmp_path, tmp_path / "model", label="environment.client")
        agent = build(AgentOptions.model_validate(given), context)
        engine = ScriptedEngine(tokenizer, client.replies, waits_in_turn=waits_in_turn)
        scores = WeightedReward("environment", EnvironmentReward(), 1.0, DEADLINE_S)
        runner = RolloutRunner(
            {"agent": agent}, [scores], engine, tokenizer, deadline_s=DEADLINE_S, deterministic=False,
            vocabulary=tokenizer.vocabulary,
        )  # fmt: skip
        try:
            await agent.open()
            yield Trial(agent, engine, runner, tmp_path)
        finally:
            engine.go_on.set()
            await agent.close()

    return make
