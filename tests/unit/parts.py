"""What the unit tests of the core share: records of known content, an engine with scripted replies, a plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.errors import DeadlineExceeded
from atropos_core.interfaces import Engine, Environment, ModelInfo
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Draw, Episode, Rollout, Sampling, Score, ScoredGroup, Task, Tokens, tokens

TOKENIZER = ChatTokenizer(TOY_MODEL)  # one id a character; 0 ends a reply, 1 is the user, 2 the assistant
END, USER, ASSISTANT = 0, 1, 2


def ids(text: str) -> list[int]:
    return [int(number) for number in TOKENIZER.encode(text)]


def rollout(prompt: int = 2, sampled: int = 3, *, version: int = 0, logprob: float = -0.5, **columns: Any) -> Rollout:
    """`prompt` tokens that were given, then `sampled` ones."""
    chosen = np.arange(prompt + sampled) >= prompt
    values: dict[str, Any] = {
        "tokens": np.arange(10, 10 + len(chosen), dtype=np.int32),
        "sampled": chosen,
        "trained": chosen,
        "logprobs": np.where(chosen, logprob, 0).astype(np.float32),
        "policy_version": np.where(chosen, version, 0).astype(np.int32),
        "temperature": 1.0,
    }
    return Rollout(**(values | columns))


def episode(score: float = 0.0, reply: str = "", *rollouts: Rollout, **fields: Any) -> Episode:
    conversation = ({"role": "user", "content": "?"}, {"role": "assistant", "content": reply})
    return Episode(rollouts or (rollout(),), score, messages=conversation, **fields)


def group(number: int, rewards: Sequence[float] = (0.0, 1.0), *, version: int = 0, sampled: int = 3) -> ScoredGroup:
    """Draw `number`, scored. Every rollout has 2 + `sampled` tokens."""
    return ScoredGroup(
        draw(number),
        Task(f"train-{number}", ({"role": "user", "content": str(number)},)),
        tuple(episode(reward, "", rollout(sampled=sampled, version=version)) for reward in rewards),
        np.array(rewards, np.float32),
    )


def draw(number: int, environment: str = "words", split: Any = "train") -> Draw:
    return Draw(number, environment, split, number, 1000 + number)


class SayingEngine(Engine):
    """Replies with `say(prompt, seed)` as text, ended by the end token. Keeps its requests."""

    def __init__(self, say: Callable[[Tokens, int], str] = lambda prompt, seed: "ok", *, finish: str = "stop") -> None:
        self.requests: list[tuple[Tokens, Sampling, list[int], float]] = []
        self.cancelled = 0
        self.endpoint = LocalEndpoint(self)
        self._say = say
        self._finish = finish

    async def open(self) -> ModelInfo:
        return ModelInfo("Saying", 0, TOKENIZER.vocabulary, "float32", "cpu", TOKENIZER.fingerprint)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.requests.append((prompt, sampling, list(seeds), deadline_s))
        await asyncio.sleep(0)
        return [self._completion(self._say(prompt, seed), sampling) for seed in seeds]

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    def _completion(self, text: str, sampling: Sampling) -> Completion:
        reply = ids(text) + [END] * (self._finish == "stop")
        logprobs = -np.arange(1, len(reply) + 1, dtype=np.float32)
        versions = np.full(len(reply), 7, np.int32)
        return Completion(tokens(reply), logprobs, versions, self._finish, sampling.temperature, sampling.truncated)  # type: ignore[arg-type]


class SilentEngine(SayingEngine):
    """Never answers. Counts the samples that were cancelled."""

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.requests.append((prompt, sampling, list(seeds), deadline_s))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise DeadlineExceeded("unreachable")


class Words(Environment):
    """Tasks of one turn, scored by the length of the reply."""

    def __init__(self, size: int = 8) -> None:
        self._size = size

    def tasks(self, split: Any) -> Sequence[Task]:
        return [
            Task(f"{split}-{n}", ({"role": "user", "content": str(n)},), answer=str(n), data={"n": n})
            for n in range(self._size)
        ]

    async def score(self, task: Task, reply: Any) -> float | Score:
        return float(len(reply["content"]))


def install_plugin(folder: Path, name: str, source: str) -> None:
    """A plugin as pip would leave it: importable from `folder`, with its entry point beside it."""
    (folder / f"{name}.py").write_text(source)
    installed = folder / f"{name}-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (installed / "entry_points.txt").write_text(f"[atropos]\n{name} = {name}\n")
