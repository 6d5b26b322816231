"""The contract of an engine: its samples match its logprobs and their seeds, and nothing is sampled while it is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Finish, Sampling, Tokens
from atropos_testing.samples import make_task
from atropos_testing.stages import DEADLINE_S, StagedContract

LIMIT = 8  # tokens of a reply
PAUSED_FOR_S = 0.3  # what is requested of a paused engine must not come within
BOUND_NATS = {"float32": 1e-4, "float64": 1e-4}  # its logprobs of what it sampled, scored again; other dtypes: 0.5


class EngineContract(StagedContract):
    """Checks one engine in this process, with the weights that it opens."""

    made: Engine
    stages = {  # noqa: RUF012 - ClassVar of the base
        "model": (
            "says what model it opened",
            "open() returns a ModelInfo with the vocabulary and the tokenizer's fingerprint of RunContext.model.",
        ),
        "samples": (
            "tokens, logprobs and versions of one length, as requested",
            "Give `n` completions, each of 1 to max_tokens ids of the vocabulary, with the logprob and the version of each.",
        ),
        "seeds": (
            "the i-th completion follows the i-th seed",
            "Draw each completion with its own seed: the same seeds give the same, others something else.",
        ),
        "greedy": ("temperature 0 gives the likeliest tokens", "At temperature 0 seeds do not matter."),
        "stop ids": (
            "a completion ends with the first token of Sampling.stop_ids",
            'End a completion there as at the end of a turn, with finish "stop", and keep that token.',
        ),
        "logprobs": (
            "what it sampled has the same logprobs when it is scored",
            "Logprobs are of the distribution that was sampled from; entry 0 of logprobs() is 0.",
        ),
        "calls at once": ("the same as one after another", "Keep what belongs to a call in local variables."),
        "pauses": (
            "nothing comes while it is paused, and then all of it",
            "Return from pause() once no token is computed; keep what is in flight until resume().",
        ),
        "versions": ("tokens carry the version that it was resumed at", "resume(version) marks every token from there on."),
    }  # fmt: skip

    async def open(self) -> Sequence[str]:
        self.made, self._info = await self.opened_with_a_model()
        self._tokenizer = ChatTokenizer(self.subject.context.model)
        self._prompt = self._tokenizer.render(make_task().messages)
        return (
            [] if isinstance(self._info, ModelInfo) else [f"open() returned {self._info!r:.80}, which is no ModelInfo"]
        )

    async def check_model(self) -> Sequence[str]:
        wrong = []
        if self._info.tokenizer != self._tokenizer.fingerprint:
            wrong.append(f"its tokenizer is {self._info.tokenizer!r}, the model's {self._tokenizer.fingerprint!r}")
        if self._info.vocabulary < self._tokenizer.vocabulary:
            wrong.append(
                f"a vocabulary of {self._info.vocabulary}, but the tokenizer has {self._tokenizer.vocabulary} ids"
            )
        return wrong

    async def check_samples(self) -> Sequence[str]:
        completions = await self._sample(range(5))
        wrong = [] if len(completions) == 5 else [f"{len(completions)} completions of 5 that were requested"]
        return [*wrong, *(problem for one in completions for problem in self._wrong_with(one, version=0))]

    async def check_seeds(self) -> Sequence[str]:
        first, again = await self._sample(range(8)), await self._sample(range(8))
        turned = await self._sample(reversed(range(8)))
        wrong = [] if _same(first, again) else ["the same seeds gave other tokens the second time"]
        if not _same(first, list(reversed(turned))):
            wrong.append("seeds in another order gave other tokens: the i-th is not drawn with the i-th seed")
        if len({one.tokens.tobytes() for one in first}) == 1:
            wrong.append("eight seeds gave one reply eight times")
        return wrong

    async def check_greedy(self) -> Sequence[str]:
        found = await self._sample(range(3), temperature=0.0)
        return [] if len({one.tokens.tobytes() for one in found}) == 1 else ["three seeds gave different replies"]

    async def check_stop_ids(self) -> Sequence[str]:
        completions = await self._sample(range(8))
        seed = max(range(len(completions)), key=lambda at: len(completions[at].tokens))
        whole = completions[seed]
        stop = int(whole.tokens[(len(whole.tokens) - 1) // 2])
        [cut] = await self._sample([seed], stop_ids=(stop,))
        expected = whole.tokens[: int(np.flatnonzero(whole.tokens == stop)[0]) + 1]
        wrong = []
        if cut.tokens.tolist() != expected.tolist():
            wrong.append(f"it sampled {cut.tokens.tolist()}, where {expected.tolist()} ends with the stop id {stop}")
        if cut.finish != "stop":
            wrong.append(f"finish {cut.finish!r} of what ended at a stop id; it is 'stop'")
        return wrong

    async def check_logprobs(self) -> Sequence[str]:
        completions = await self._sample(range(3))
        whole = [np.concatenate([self._prompt, one.tokens]).astype(np.int32) for one in completions]
        try:
            scored = await self.made.logprobs(whole)
        except NotImplementedError:
            self.report.note("scores", "it cannot score given tokens: only the trainer can check what it sampled")
            return []
        wrong = [
            f"{len(s)} logprobs of {len(w)} tokens" for s, w in zip(scored, whole, strict=True) if len(s) != len(w)
        ]
        if wrong:
            return wrong
        bound, start = BOUND_NATS.get(self._info.dtype, 0.5), len(self._prompt)
        pairs = zip(scored, completions, strict=True)
        apart = float(np.max([np.abs(s[start:] - one.logprobs).max() for s, one in pairs]))
        if not apart <= bound:
            wrong.append(
                f"{apart:.3g} nats between what it said when it sampled and when it scored; the bound is {bound:g}"
            )
        return [*wrong, *(f"entry 0 is {s[0]:.3g}" for s in scored if s[0] != 0)]

    async def check_calls_at_once(self) -> Sequence[str]:
        alone = [await self._sample([seed]) for seed in range(4)]
        at_once = await asyncio.gather(*(self._sample([seed]) for seed in range(4)))
        return (
            []
            if all(map(_same, alone, at_once))
            else ["calls at once gave other tokens than the same calls one by one"]
        )

    async def check_pauses(self) -> Sequence[str]:
        await self.made.pause()
        asking = asyncio.ensure_future(self._sample([1]))
        await asyncio.wait({asking}, timeout=PAUSED_FOR_S)
        early = asking.done()
        await self.made.resume(3)
        await asking
        return ["what was requested while it was paused came while it was paused"] if early else []

    async def check_versions(self) -> Sequence[str]:
        return [problem for one in await self._sample([5]) for problem in self._wrong_with(one, version=3)]

    async def _sample(
        self, seeds: Iterable[int], temperature: float = 1.0, stop_ids: tuple[int, ...] = ()
    ) -> list[Completion]:
        given = list(seeds)
        sampling = Sampling(LIMIT, temperature, stop_ids=stop_ids)
        return await self.made.sample(self._prompt, len(given), sampling, given, DEADLINE_S)

    def _wrong_with(self, one: Completion, *, version: int) -> list[str]:
        size = len(one.tokens)
        wrong = [] if 1 <= size <= LIMIT else [f"{size} tokens, where 1 to {LIMIT} were requested"]
        if not size == len(one.logprobs) == len(one.policy_version):
            wrong.append(f"{size} tokens with {len(one.logprobs)} logprobs and {len(one.policy_version)} versions")
        if size and not 0 <= one.tokens.min() <= one.tokens.max() < self._info.vocabulary:
            wrong.append(
                f"token {_outside(one.tokens, self._info.vocabulary)} of a vocabulary of {self._info.vocabulary}"
            )
        if not np.isfinite(one.logprobs).all() or (size and one.logprobs.max() > 1e-4):
            wrong.append(f"logprobs {one.logprobs.tolist()}")
        if set(one.policy_version.tolist()) - {version}:
            wrong.append(f"tokens of versions {sorted(set(one.policy_version.tolist()))}, and it is at {version}")
        if one.finish not in get_args(Finish):
            wrong.append(f"finish {one.finish!r}; there is: {', '.join(get_args(Finish))}")
        return wrong


def _outside(tokens: Tokens, vocabulary: int) -> int:
    return int(tokens[(tokens < 0) | (tokens >= vocabulary)][0])


def _same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    return [each.tokens.tobytes() for each in one] == [each.tokens.tobytes() for each in other]
