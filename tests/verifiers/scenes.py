"""What the tests of both contracts share: environments that are opened, and a policy that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Episode
from atropos_env_verifiers.config import VerifiersOptions
from atropos_env_verifiers.environment import VerifiersEnvironment
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of

HERE = Path(__file__).parent
TINY = "tiny-tools"


def sums(folder: Path, train: int = 60, test: int = 12) -> Path:
    """A data set of the hub, as files."""
    for split, count, first in (("train", train, 2), ("test", test, 90)):
        rows = [
            {"question": f"What is {first + at} plus {at % 7}?", "answer": str(first + at + at % 7)}
            for at in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@asynccontextmanager
async def opened(directory: Path, **options: Any) -> AsyncIterator[VerifiersEnvironment]:
    model = load_plugins().resolve_model(TINY).directory
    context = RunContext(directory=directory, model=model, label="environment.test")
    environment = VerifiersEnvironment(VerifiersOptions(**options), context)
    try:
        await environment.open()
        yield environment
    finally:
        await environment.close()


class WaitingEngine(LedgerEngine):
    """It says how many samples have come to it."""

    waiting = 0

    async def sample(self, *arguments: Any) -> list[Completion]:
        self.waiting += 1
        return await super().sample(*arguments)


def scripted(say: Callable[[str, int], str]) -> tuple[WaitingEngine, Any]:
    """The engine's ledger has every token that was sampled, with a logprob of its own."""
    tokenizer = ChatTokenizer(load_plugins().resolve_model(TINY).directory)
    engine = WaitingEngine(tokenizer, say)
    return engine, policy_of(engine, tokenizer)


def sampled(episode: Episode) -> tuple[list[int], list[float]]:
    """Ids and logprobs of all that it sampled."""
    ids = [int(one) for rollout in episode.rollouts for one in rollout.tokens[rollout.sampled]]
    return ids, [float(one) for rollout in episode.rollouts for one in rollout.logprobs[rollout.sampled]]


def in_ledger(engine: LedgerEngine) -> set[tuple[tuple[int, ...], tuple[float, ...]]]:
    return {(tuple(entry.tokens.tolist()), tuple(entry.logprobs.tolist())) for entry in engine.ledger}


def child_of() -> psutil.Process:
    [child] = [one for one in psutil.Process().children() if "atropos_env_verifiers.host" in " ".join(one.cmdline())]
    return child
