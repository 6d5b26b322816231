"""The contract of a trainer: parameters change only inside `writing`, and a restored one continues like the first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from atropos_core.interfaces import ModelInfo, Trainer
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.batch import to_batch
from atropos_core.types import Batch, Draw, Episode, Floats, Rollout, ScoredGroup, Tokens
from atropos_testing.samples import make_task
from atropos_testing.stages import StagedContract

REPLY = 6  # tokens
EXACT_NATS = 1e-5  # of a restored trainer's logprobs


class TrainerContract(StagedContract):
    """Checks one trainer in this process, with the weights that it opens."""

    made: Trainer
    stages = {  # noqa: RUF012 - ClassVar of the base
        "logprobs": (
            "one for each token, entry 0 is 0, none above 0",
            "logprobs() gives f32[T] of each sequence: entry t is log p(token t | tokens before it), entry 0 is 0.",
        ),
        "writing": (
            "entered once in a step, and nothing changes outside of it",
            "Change parameters only inside `async with writing():`, once in a step: engines may read them at any other time.",
        ),
        "learns": (
            "what has a higher advantage becomes likelier",
            "A token's logprob must rise if its advantage is above 0.",
        ),
        "metrics": ("finite numbers by name", "step() returns a mapping from names to finite numbers."),
        "restores": (
            "a new one that is restored continues like the first",
            "save() writes everything that the next step depends on, also the optimizer's state; restore() loads it.",
        ),
    }  # fmt: skip

    async def open(self) -> Sequence[str]:
        self.made, info = await self.opened_with_a_model()
        tokenizer = ChatTokenizer(self.subject.context.model)
        self._prompt = tokenizer.render(make_task().messages)
        if not isinstance(info, ModelInfo):
            return [f"open() returned {info!r:.80}, which is no ModelInfo"]
        ids = tokenizer.vocabulary
        self._replies = [np.arange(i, i + REPLY, dtype=np.int32) % ids for i in (3, 11)]  # the good one, the bad one
        wrong = (
            [] if info.tokenizer == tokenizer.fingerprint else ["ModelInfo.tokenizer is not the model's fingerprint"]
        )
        return wrong if info.vocabulary >= ids else [*wrong, f"a vocabulary of {info.vocabulary} for {ids} token ids"]

    async def check_logprobs(self) -> Sequence[str]:
        sequences = self._sequences()
        found = await self.made.logprobs(sequences)
        if [len(one) for one in found] != [len(one) for one in sequences]:
            return [f"{[len(one) for one in found]} logprobs of {[len(one) for one in sequences]} tokens"]
        return [
            f"entry 0 is {one[0]:.3g}" if one[0] else f"logprobs from {one.min():.3g} to {one.max():.3g}"
            for one in found
            if one[0] or not np.isfinite(one).all() or one.max() > 1e-4
        ]

    async def check_writing(self) -> Sequence[str]:
        self._before = await self._scores()
        seen: list[Floats] = []

        @asynccontextmanager
        async def writing() -> AsyncIterator[None]:
            seen.append(await self._scores())
            yield
            seen.append(await self._scores())

        self._metrics = await self.made.step(self._batch(1), writing)
        self._after = await self._scores()
        if len(seen) != 2:
            return [f"step() entered writing() {len(seen) // 2} times"]
        wrong = [] if np.array_equal(seen[0], self._before) else ["parameters had changed before writing() was entered"]
        return (
            wrong if np.array_equal(seen[1], self._after) else [*wrong, "parameters changed after writing() was left"]
        )

    async def check_learns(self) -> Sequence[str]:
        good, bad = self._after - self._before
        if good == bad == 0:
            return ["a step left every parameter as it was"]
        return (
            []
            if good > bad
            else [f"the reply with advantage 1 went by {good:+.3g} nats, the one with -1 by {bad:+.3g}"]
        )

    async def check_metrics(self) -> Sequence[str]:
        return [
            f"{name!r} is {value!r}"
            for name, value in self._metrics.items()
            if not isinstance(value, (int, float)) or (not np.isfinite(value) and name in ("loss", "grad_norm"))
        ]

    async def check_restores(self) -> Sequence[str]:
        directory = Path(mkdtemp(dir=self.subject.context.directory))
        await self.made.save(directory)
        if not any(directory.iterdir()):
            return ["save() left its directory empty"]
        other: Trainer
        other, _ = await self.opened_with_a_model()
        try:
            await other.restore(directory)
            wrong = []
            for when, step in (("once it is restored", None), ("after one more step of both", 2)):
                if step is not None:
                    for each in (self.made, other):
                        await each.step(self._batch(step), _free)
                apart = np.abs(await self._scores() - await self._scores(other)).max()
                if not apart <= EXACT_NATS:
                    wrong.append(f"{apart:.3g} nats apart {when}")
            return wrong
        finally:
            await other.close()

    async def _scores(self, trainer: Trainer | None = None) -> Floats:
        """Return [2]: the logprob of the good reply and of the bad one."""
        found = await (trainer or self.made).logprobs(self._sequences())
        return np.array([one[len(self._prompt) :].sum() for one in found], np.float32)

    def _sequences(self) -> list[Tokens]:
        return [np.concatenate([self._prompt, reply]).astype(np.int32) for reply in self._replies]

    def _batch(self, version: int) -> Batch:
        """Make one group: the good reply with advantage 1, the bad one with -1."""
        task = make_task()
        episodes = tuple(Episode((self._rollout(tokens, version),), 0.0) for tokens in self._sequences())
        group = ScoredGroup(Draw(version, "check", "train", 0, 0), task, episodes, np.array([1, 0], np.float32))
        return to_batch([group.with_advantages(np.array([1, -1], np.float32))], version)

    def _rollout(self, tokens: Tokens, version: int) -> Rollout:
        sampled = np.arange(len(tokens)) >= len(self._prompt)
        versions = np.full(len(tokens), version - 1, np.int32)
        return Rollout(tokens, sampled, sampled, np.where(sampled, -4.0, 0.0).astype(np.float32), versions, 1.0)


@asynccontextmanager
async def _free() -> AsyncIterator[None]:
    yield
