"""Refuse bad requests before they wait for anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atropos_core.errors import DataError
from atropos_core.group_schema import check_sampling
from atropos_core.types import Sampling, Tokens


@dataclass(frozen=True)
class RequestChecks:
    """The limits of one model."""

    vocabulary: int
    longest: int | None  # positions; None: no limit
    media: Mapping[str, int]  # ids of tokens that stand for something other than text, by what that is

    def check_prompt(self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int]) -> None:
        """Raises DataError for a request that no model could answer."""
        if not len(prompt):
            raise DataError("a prompt has no tokens: there is nothing to continue")
        self._check_ids(prompt)
        self._check_text(prompt)
        if len(seeds) < n:
            raise DataError(f"{n} continuations were requested with {len(seeds)} seeds: each needs its own")
        check_sampling(sampling)
        if self.longest is not None and len(prompt) + sampling.max_tokens > self.longest:
            raise DataError(
                f"a prompt of {len(prompt)} tokens and max_tokens = {sampling.max_tokens} make"
                f" {len(prompt) + sampling.max_tokens}, and the model has {self.longest} positions.",
                remedy=f"Set max_tokens to at most {max(0, self.longest - len(prompt))}, or shorten the prompt.",
            )

    def check_scored(self, sequence: Tokens) -> None:
        """Raises DataError or NotImplementedError for a sequence that the model cannot score."""
        self._check_ids(sequence)
        if self.longest is not None and len(sequence) > self.longest:
            raise NotImplementedError(
                f"a sequence of {len(sequence)} tokens was to be scored, and the model has {self.longest} positions"
            )

    def _check_text(self, prompt: Tokens) -> None:
        for what, token in self.media.items():
            if count := int(np.count_nonzero(prompt == token)):
                raise DataError(
                    f"a prompt has {count} tokens that stand for {what} (id {token}), and engine 'hf' samples from text only: it"
                    f" has no processor for {what}, and the model never gets their pixels or samples.",
                    remedy="Leave images, videos and audio out of the tasks of this run.",
                )

    def _check_ids(self, tokens: Tokens) -> None:
        if len(tokens) and not (int(np.min(tokens)) >= 0 and int(np.max(tokens)) < self.vocabulary):
            raise DataError(
                f"token ids from {int(np.min(tokens))} to {int(np.max(tokens))} are not all in the model's vocabulary"
                f" of {self.vocabulary}: they come from another tokenizer."
            )
