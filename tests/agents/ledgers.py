"""What was sampled beside what is trained: each token with its logprob, which no other token of a ledger has."""

from __future__ import annotations

from collections.abc import Iterable

from atropos_core.types import Batch, Episode
from plugins.agent_api.tests.ledger_engine import Entry

Token = tuple[int, float, int]  # id, logprob, policy version


def sampled(ledger: Iterable[Entry]) -> list[Token]:
    return sorted(
        token
        for entry in ledger
        for token in zip(entry.tokens.tolist(), entry.logprobs.tolist(), entry.versions.tolist(), strict=True)
    )


def trained(episode: Episode) -> list[Token]:
    found: list[Token] = []
    for one in episode.rollouts:
        assert one.logprobs is not None
        columns = one.tokens[one.trained], one.logprobs[one.trained], one.policy_version[one.trained]
        found += zip(*(column.tolist() for column in columns), strict=True)
    return sorted(found)


def trained_in(batch: Batch) -> list[Token]:
    columns = (column[batch.trained].tolist() for column in (batch.tokens, batch.logprobs, batch.policy_version))
    return sorted(zip(*columns, strict=True))
