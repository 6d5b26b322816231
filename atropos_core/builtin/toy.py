"""A policy of one small table, with engine and trainer: a complete run in numpy, in one process.

For tests of environments, rewards and plugins, where a language model would only be slow. The table holds the logits of the
next token given the last one. The trainer is plain REINFORCE on the batch's advantages (Williams 1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.builtin.config import ToyEngineOptions, ToyTrainerOptions
from atropos_core.errors import TrainingDiverged
from atropos_core.health.alignment import compare
from atropos_core.interfaces import Engine, ModelInfo, Trainer, Writing
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import taking_up
from atropos_core.storage.reading import open_file
from atropos_core.types import KEPT, Batch, Completion, Floats, Kept, Metrics, Ragged, Sampling, Tokens

Table = NDArray[np.float64]


class ToyEngine(Engine):
    """Samples from the table."""

    def __init__(self, options: ToyEngineOptions, context: RunContext) -> None:
        import asyncio

        self._tokenizer = ChatTokenizer(context.model, context.today)
        self._latency_s = options.latency_s
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._version = 0
        self._end = int(self._tokenizer.encode(self._tokenizer.eos)[0])
        self.weights = {"table": _table(self._tokenizer)}
        self.endpoint = LocalEndpoint(self)

    async def open(self) -> ModelInfo:
        return _info(self._tokenizer)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        import asyncio

        await asyncio.sleep(self._latency_s)
        await self._may_run.wait()
        return [self._one(int(prompt[-1]), sampling, seed) for seed in seeds]

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [_score(self.weights["table"], ids, temperature) for ids in sequences]

    async def pause(self) -> None:
        self._may_run.clear()

    async def resume(self, version: int) -> None:
        self._version = version
        self._may_run.set()

    def _one(self, last: int, sampling: Sampling, seed: int) -> Completion:
        uniforms = np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_tokens)
        ends = {self._end, *sampling.stop_ids}
        ids: list[int] = []
        logprobs: list[float] = []
        kept: list[Tokens] = []
        for uniform in uniforms:
            scaled = _cut(_log_softmax(self.weights["table"][last] / (sampling.temperature or 1.0)), sampling)
            kept.append(np.flatnonzero(np.isfinite(scaled)).astype(np.int32))
            greedy = sampling.temperature == 0
            cumulative = np.cumsum(np.exp(scaled))
            last = int(
                scaled.argmax() if greedy else np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
            )
            ids.append(last)
            logprobs.append(float(scaled[last]))
            if last in ends:
                break
        return Completion(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            np.full(len(ids), self._version, np.int32),
            "stop" if last in ends else "length",
            sampling.temperature,
            sampling.truncated,
            Kept(np.array([*map(len, kept)], np.int32), np.concatenate(kept)) if sampling.truncated else None,
        )


class ToyTrainer(Trainer):
    """Ascends the advantage-weighted logprob of the sampled tokens."""

    def __init__(self, options: ToyTrainerOptions, context: RunContext) -> None:
        self._tokenizer = ChatTokenizer(context.model, context.today)
        self._rate = options.learning_rate
        self.weights = {"table": _table(self._tokenizer)}
        self.endpoint = LocalEndpoint(self)
        self._token_values: Mapping[str, Floats] = {}

    async def open(self) -> ModelInfo:
        return _info(self._tokenizer)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        table = self.weights["table"]
        starts = np.zeros(len(batch.tokens), bool)
        starts[batch.offsets[:-1]] = True
        at = np.flatnonzero(batch.sampled & ~starts)
        temperature = np.repeat(np.where(batch.temperature > 0, batch.temperature, 1), batch.lengths)[at]
        before, after = batch.tokens[at - 1], batch.tokens[at]
        logprobs = _log_softmax(table[before] / temperature[:, None])  # [n, vocabulary]
        if (kept := batch.ragged.get(KEPT)) is not None:
            logprobs = _renormalised(logprobs, kept.select(at))
        chosen = logprobs[np.arange(len(at)), after]
        recomputed = np.zeros(len(batch.tokens), np.float32)
        recomputed[at] = chosen
        scored = batch.sampled & ~starts
        entropy = np.full(len(batch.tokens), np.nan, np.float32)
        entropy[at] = -(np.exp(logprobs) * np.where(np.isfinite(logprobs), logprobs, 0.0)).sum(axis=-1)
        weight = (batch.advantages * batch.trained)[at] / max(int(batch.trained.sum()), 1)
        gradient = np.zeros_like(table)
        np.add.at(gradient, (before, after), weight)
        np.add.at(gradient, before, -weight[:, None] * np.exp(logprobs))
        if not np.isfinite(gradient).all():
            raise TrainingDiverged("the gradient is not finite; the weights were not touched.")
        async with writing():
            table += self._rate * gradient
        logprobs_or_nan = np.where(scored, recomputed, np.float32(np.nan))
        self._token_values = {"advantages": batch.advantages, "trainer_logprobs": logprobs_or_nan, "entropy": entropy}
        return {
            "loss": float(-(weight * chosen).sum()),
            "grad_norm": float(np.linalg.norm(gradient)),
            **compare(batch, recomputed, scored, scored, entropy),
        }

    async def token_values(self) -> Mapping[str, Floats]:
        return self._token_values

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return [_score(self.weights["table"], ids, temperature) for ids in sequences]

    async def save(self, directory: Path) -> None:
        np.save(directory / "table.npy", self.weights["table"])

    async def restore(self, directory: Path) -> None:
        table = self.weights["table"]
        with taking_up(f"the trainer's state in {directory}"):
            with open_file(directory / "table.npy") as file:
                saved = np.load(file)
            if saved.shape != table.shape:
                raise ValueError(f"its table has the shape {list(saved.shape)}, and this policy's {list(table.shape)}")
            table[:] = saved


def _cut(scores: Table, sampling: Sampling) -> Table:
    """Set tokens that `min_p`, `top_k` and `top_p` do not keep to minus infinity, and renormalise."""
    if not sampling.truncated:
        return scores
    order = np.argsort(-scores, kind="stable")[: sampling.most_kept]
    order = order[np.exp(scores[order] - scores[order[0]]) >= sampling.min_p]
    mass = np.cumsum(np.exp(scores[order]))
    order = order[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    kept = np.full_like(scores, -np.inf)
    kept[order] = scores[order]
    return _log_softmax(kept)


def _renormalised(logprobs: Table, kept: Ragged) -> Table:
    """Renormalise logprobs [n, V] over the tokens that were kept at each row; a row without any stays as it is."""
    sizes = np.diff(kept.offsets)
    there = np.repeat(sizes[:, None] == 0, logprobs.shape[1], axis=1)
    there[np.repeat(np.arange(len(sizes)), sizes), kept.values] = True
    return _log_softmax(np.where(there, logprobs, -np.inf))


def _table(tokenizer: ChatTokenizer) -> Table:
    return np.zeros((tokenizer.vocabulary, tokenizer.vocabulary))


def _info(tokenizer: ChatTokenizer) -> ModelInfo:
    size = tokenizer.vocabulary
    return ModelInfo("ToyTable", size * size, size, "float64", "cpu", tokenizer.fingerprint, 1)


def _log_softmax(logits: Any) -> Table:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _score(table: Table, ids: Tokens, temperature: float) -> Floats:
    scores = _log_softmax(table[ids[:-1]] / (temperature or 1.0))[np.arange(len(ids) - 1), ids[1:]]
    return np.concatenate([[0.0], scores]).astype(np.float32)
