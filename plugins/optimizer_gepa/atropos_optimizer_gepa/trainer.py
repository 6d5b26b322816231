"""The trainer `gepa`: each step of the run rewards one prompt, and the next prompt is made from the results.

GEPA (arXiv 2507.19457): a parent is drawn from the prompts that no other one beats on every task. A model that is shown some of the
parent's rollouts and rewards writes a child, which is tried on the tasks of the next step. The model's weights do not change.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.errors import CheckpointError, DataError
from atropos_core.guards.deadlines import within
from atropos_core.health.alignment import compare
from atropos_core.interfaces import ModelInfo, Trainer, Writing
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import AS_WRITTEN, taking_up
from atropos_core.storage.reading import parse_json, read_text
from atropos_core.types import Batch, Floats, Metrics, Tokens
from atropos_optimizer_gepa.candidates import Candidate, best, frequencies, table
from atropos_optimizer_gepa.config import GepaOptions
from atropos_optimizer_gepa.prompted import PROMPT_FILE, Posed, posed, published
from atropos_optimizer_gepa.proposers import proposer
from atropos_torch_models.cpu_warmup import warm_up
from atropos_torch_models.devices import refuse_missing
from atropos_torch_models.rounding import measured_rounding

STATE = "candidates.json"


class GepaTrainer(Trainer):
    """`_tried` holds the prompts in the order of their steps; engines sample with the last one."""

    def __init__(self, options: GepaOptions, context: RunContext) -> None:
        self._options = options
        self._context = context
        self._propose = proposer(options)
        self._tried: list[Candidate] = []
        self.endpoint = LocalEndpoint(self)

    async def open(self) -> ModelInfo:
        self._tokenizer = ChatTokenizer(self._context.model, self._context.today)
        return await asyncio.to_thread(self._open)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        if others := sorted(set(batch.policy_version[batch.sampled].tolist()) - {batch.version - 1}):
            raise DataError(f"trainer 'gepa' was given tokens of versions {others} for {batch.version - 1}.")
        self._tried = self._tried or [Candidate(published.get(self._context.directory, ""))]
        tried = self._tried[-1]
        self._note(batch, tried)
        spans = list(zip(batch.offsets[:-1], batch.offsets[1:], batch.temperature.tolist(), strict=True))
        recomputed = np.concatenate([(await self.logprobs([batch.tokens[a:b]], heat))[0] for a, b, heat in spans])
        start = perf_counter()
        parent = self._rng().choices(range(len(self._tried)), frequencies(table(self._tried)).tolist())[0]
        if batch.version < self._context.steps:
            proposal = self._propose(self._tried[parent].prompt, self._tried[parent].examples, self._rng())
            child = await within(proposal, self._options.deadline_s, f"proposer {self._options.proposer!r}")
            if (length := len(self._tokenizer.encode(child))) > self._positions // 2:
                console.warn(
                    f"a proposed prompt of {length:,} tokens leaves too little of the model's {self._positions:,} positions, and its "
                    f"parent is tried again. It begins: {child[:80]!r}"
                )
                child = self._tried[parent].prompt
        else:  # the last evaluation is of the best
            parent = best(self._tried)
            child = self._tried[parent].prompt
        async with writing():
            self._tried.append(Candidate(child, parent))
            published[self._context.directory] = child
        means = [one.mean for one in self._tried[:-1]]
        return {
            "gepa/reward": means[-1], "gepa/best": max(means), "gepa/parent": float(tried.parent),
            "gepa/characters": float(len(tried.prompt)),
            "gepa/unchanged": float(child == self._tried[parent].prompt), "gepa/proposal_s": perf_counter() - start,
            **compare(batch, recomputed, batch.sampled, batch.sampled),
        }  # fmt: skip

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await asyncio.to_thread(lambda: [self._logprobs(one, temperature or 1.0) for one in sequences])

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:

        return await measured_rounding(self._model, lambda: self.logprobs(sequences, temperature))

    async def save(self, directory: Path) -> None:
        """Save the unchanged model, with the best prompt next to it."""
        await asyncio.to_thread(self._save, directory)

    async def restore(self, directory: Path) -> None:
        with taking_up(f"the prompts in {directory / STATE}"):
            try:
                saved = parse_json(read_text(directory / STATE))
            except OSError as error:
                raise CheckpointError(
                    f"the prompts in {directory / STATE} cannot be read: {error}.", remedy=AS_WRITTEN
                ) from error
            tried = [Candidate.of(at, **one) for at, one in enumerate(saved)]
            published[self._context.directory] = tried[-1].prompt
        self._tried = tried

    def _rng(self) -> random.Random:
        """Return the step's random generator, which a resume does not change."""
        return random.Random(f"{self._context.seed}/{len(self._tried)}")

    def _note(self, batch: Batch, tried: Candidate) -> None:
        """Record a prompt's rewards by task. Each episode counts once."""
        rewards: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        rows = []
        tasks = posed.pop(self._context.directory, {})
        for start, end, episode in zip(batch.offsets[:-1], batch.offsets[1:], batch.episode.tolist(), strict=True):
            trained, tokens = batch.trained[start:end], batch.tokens[start:end]
            if trained.any():
                first = int(np.argmax(batch.sampled[start:end]))
                task = tasks.get(tokens.tobytes()) or self._without_prompt(tokens[:first])
                reward = float(batch.advantages[start:end][trained].mean(dtype=np.float64))
                rows.append((task.text, self._tokenizer.decode(tokens[first:]), reward))
                rewards[task.name][episode].append(reward)
        if not rows:
            raise DataError("trainer 'gepa' was given a batch of which no token is trained: it has no reward.")
        tried.scores = {
            task: float(np.mean([np.mean(each) for each in episodes.values()])) for task, episodes in rewards.items()
        }
        rows.sort(key=lambda row: row[2])
        worst = self._options.examples // 2
        tried.examples = rows[:worst] + rows[max(len(rows) - self._options.examples + worst, worst) :]

    def _without_prompt(self, tokens: Tokens) -> Posed:
        """Name a task of an environment that is not `prompted` by its text, which is always the same because it has no prompt."""
        text = self._tokenizer.decode(tokens)
        return Posed(text, text)

    def _open(self) -> ModelInfo:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if self._context.threads:
            torch.set_num_threads(self._context.threads)
        causal: Any = AutoModelForCausalLM
        device = self._context.devices[0]
        refuse_missing(device, "trainer 'gepa'")
        warm_up()
        dtype = "float32" if device == "cpu" else "auto"
        self._model = (
            causal.from_pretrained(self._context.model, dtype=dtype, trust_remote_code=False).to(device).eval()
        )
        self._positions = int(getattr(self._model.config, "max_position_embeddings", None) or 1 << 30)
        return ModelInfo(
            architecture=type(self._model).__name__, parameters=sum(one.numel() for one in self._model.parameters()),
            vocabulary=int(self._model.config.vocab_size), dtype=str(self._model.dtype).removeprefix("torch."), device=device,
            tokenizer=self._tokenizer.fingerprint, threads=torch.get_num_threads(),
        )  # fmt: skip

    def _logprobs(self, tokens: Tokens, temperature: float) -> Floats:
        import torch

        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._context.devices[0])[None]
        with torch.no_grad():
            logits = self._model(ids).logits[0, :-1].float() / temperature
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), found.cpu().numpy()])

    def _save(self, directory: Path) -> None:
        for path in (
            one for one in self._context.model.iterdir() if one.is_file() and one.name not in (STATE, PROMPT_FILE)
        ):
            try:
                os.link(path, directory / path.name)
            except OSError:  # on another file system
                shutil.copy2(path, directory / path.name)
        tried = self._tried or [Candidate(published.get(self._context.directory, ""))]
        (directory / STATE).write_text(json.dumps([asdict(one) for one in tried]), encoding="utf-8")
        (directory / PROMPT_FILE).write_text(tried[best(tried)].prompt, encoding="utf-8")
