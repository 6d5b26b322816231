"""Publishing while requests come without pause: is anything lost, and is every token of the version that it says?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.types import Completion, Floats, Sampling, Tokens
from tests.vllm.ends import Ends

Scorer = Callable[[list[Tokens]], list[Floats]]  # logprobs as Engine.logprobs gives them


@dataclass(frozen=True)
class Answer:
    prompt: Tokens
    completion: Completion


@dataclass(frozen=True)
class Load:
    """What publishing under load looked like."""

    publishes: int
    requests: int  # sent
    answers: list[Answer]  # came back
    publish_s: list[float]
    bytes_copied: list[int]
    seconds: float

    @property
    def mixed(self) -> int:
        """Completions whose tokens are of more than one version."""
        return sum(len(set(answer.completion.policy_version.tolist())) > 1 for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(len(answer.completion.tokens) for answer in self.answers)

    def p95_s(self) -> float:
        return float(np.quantile(self.publish_s, 0.95))


async def publish_under_load(
    ends: Ends, directory: Path, *, publishes: int, concurrent: int, max_tokens: int = 48
) -> Load:
    """`concurrent` requests are in flight at every moment. Each version of the trainer is saved as
    `directory/v{version}`, for `worst_difference`."""
    sampling = Sampling(max_tokens=max_tokens)
    answers: list[Answer] = []
    sent = 0
    ending = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal sent
        draw = np.random.default_rng([11, number])
        while not ending.is_set():
            length = int(draw.integers(4, 16))
            prompt = draw.integers(3, ends.info.vocabulary - 3, size=length).astype(np.int32)
            sent += 1
            [completion] = await ends.sample(prompt, sampling)
            answers.append(Answer(prompt, completion))

    async def save(version: int) -> None:
        folder = directory / f"v{version}"
        folder.mkdir(parents=True)
        await ends.parts.trainer.save(folder)

    await save(0)
    batch = await ends.batch(Sampling(max_tokens=8))
    clients = [asyncio.create_task(client(number)) for number in range(concurrent)]
    seconds, copied = [], []
    began = time.perf_counter()
    try:
        for version in range(1, publishes + 1):
            await ends.parts.trainer.step(batch, lambda version=version: ends.parts.bridge.writing(version))
            ends.version = version
            published = ends.parts.bridge.published
            assert published is not None and published.version == version
            seconds.append(published.seconds)
            copied.append(published.bytes_copied)
            await save(version)
            await _some_new(answers, clients)
        ending.set()
        await asyncio.wait_for(asyncio.gather(*clients), 120)
    finally:
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return Load(publishes, sent, answers, seconds, copied, time.perf_counter() - began)


async def _some_new(answers: list[Answer], clients: list[asyncio.Task[None]]) -> None:
    """Let the engine get on: every second publish waits until another request has been answered."""
    had, until = len(answers), time.monotonic() + 30
    while len(answers) == had and had % 2 == 0 and time.monotonic() < until:
        for each in clients:
            if each.done():
                each.result()
        await asyncio.sleep(0.005)


def worst_difference(load: Load, directory: Path, scorer_of: Callable[[Path], Any]) -> tuple[float, int]:
    """Over all tokens: |the logprob that came back - what the version that the token names gives, with everything
    before it computed anew under that version|, in nats; and how many tokens were compared: those of `load.tokens` that name a
    version that was published."""
    worst, compared = 0.0, 0
    for version in range(load.publishes + 1):
        chosen = [answer for answer in load.answers if (answer.completion.policy_version == version).any()]
        if not chosen:
            continue
        score = scorer_of(directory / f"v{version}")
        whole = [np.concatenate([answer.prompt, answer.completion.tokens]) for answer in chosen]
        for answer, scored in zip(chosen, score(whole), strict=True):
            mine = answer.completion.policy_version == version
            gap = np.abs(scored[len(answer.prompt) :] - answer.completion.logprobs)[mine]
            worst, compared = float(np.max([worst, *gap])), compared + int(mine.sum())
    return worst, compared


def transformers_scorer(folder: Path) -> Scorer:
    """By transformers alone, float32, one sequence at a time: no cache, no batch, none of our own code."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(sequences: list[Tokens]) -> list[Floats]:
        made = []
        for sequence in sequences:
            ids = torch.from_numpy(sequence.astype(np.int64))
            logits = model(ids[None]).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            made.append(np.concatenate([[0.0], chosen.numpy()]).astype(np.float32))
        return made

    return score
