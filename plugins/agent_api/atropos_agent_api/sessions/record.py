"""The record of an episode: its calls, the fate of every token, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from atropos_agent_api.calls import Dialect
from atropos_agent_api.tokens.account import Account, is_trained, name_of
from atropos_agent_api.tokens.token_tree import Beginning, Reply, Turn, is_orphan
from atropos_core.types import Message, Metrics, Rollout


@dataclass(frozen=True)
class CallRecord:
    """One call that was answered, or that sampled although its client had gone."""

    id: str
    dialect: Dialect  # the API that it used
    parent: str  # the id of the call whose answer it continues; "" for none
    beginning: Beginning
    is_trained: bool
    is_side: bool  # it is outside the task
    is_delivered: bool
    is_orphan: bool
    prompt_tokens: int  # rendered for this call, after its parent's tokens
    sampled_tokens: int
    finish: str  # of its last choice
    is_cut: bool  # by a bound below the run's: the call's, the model's context or the session's
    hints: Mapping[str, str]
    overruled: Mapping[str, Any]  # sampling that the client asked for and did not get


@dataclass(frozen=True)
class SessionRecord:
    """The record of an episode. `messages` is the trained conversation that was answered last."""

    account: Account
    calls: tuple[CallRecord, ...]  # in the order in which they began
    messages: tuple[Message, ...]
    finish: str  # of the last reply of `messages`
    metrics: Metrics
    side: str = ""  # the beginning of the first call outside the task; "" for none
    ends_aside: bool = False  # `messages` is a conversation outside the task
    shows_task: bool = True  # False: no conversation shows the task's prompt, so it is unknown which one is the task's

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """Empty if nothing was sampled that is trained."""
        return self.account.rollouts

    def as_json(self) -> dict[str, Any]:
        """For people and for audits: every call, and the fate of every token. The run's own records have the rollouts' tokens;
        those that were dropped are here."""
        return {
            "metrics": self.metrics,
            "calls": [asdict(call) for call in self.calls],
            "spans": [asdict(span) for span in self.account.spans],
            "dropped": [asdict(part) | {"tokens": part.tokens.tolist()} for part in self.account.dropped],
        }


def call_records(turns: Sequence[Turn]) -> tuple[CallRecord, ...]:
    return tuple(
        CallRecord(
            id=name_of(turn),
            dialect=turn.dialect,
            parent="" if turn.parent is None else name_of(turn.parent.turn),
            beginning=turn.beginning,
            is_trained=is_trained(turn),
            is_side=turn.is_side,
            is_delivered=turn.is_delivered,
            is_orphan=all(map(is_orphan, turn.replies)),
            prompt_tokens=len(turn.added),
            sampled_tokens=sum(map(_sampled, turn.replies)),
            finish=turn.replies[-1].completion.finish,
            is_cut=turn.is_cut and any(reply.completion.finish == "length" for reply in turn.replies),
            hints=turn.hints,
            overruled=turn.overruled,
        )
        for turn in turns
    )


def metrics_of(account: Account, calls: Sequence[CallRecord], *, refused: int, failed: int) -> Metrics:
    """`delivered_share`: the share of the sampled tokens that is trained."""
    sampled, trained = sum(call.sampled_tokens for call in calls), account.count("trained")
    counts = {
        "calls": len(calls),
        "refused_calls": refused,
        "failed_calls": failed,
        "untrained_calls": sum(not call.is_trained for call in calls),
        "side_calls": sum(call.is_side for call in calls),
        "side_tokens": sum(call.sampled_tokens for call in calls if call.is_side),
        "overruled_calls": sum(bool(call.overruled) for call in calls),
        "cut_calls": sum(call.is_cut for call in calls),
        "edited": sum(call.beginning == "edited" for call in calls),
        "rewritten": sum(call.beginning == "rewritten" for call in calls),
        "rollouts": len(account.rollouts),
        "branches": account.branches,
        "orphans": account.orphans,
        "orphan_tokens": sum(len(one.tokens) for one in account.dropped if one.why == "orphan"),
        "sampled_tokens": sampled,
        "trained_tokens": trained,
        "context_tokens": account.count("context"),
        "dropped_tokens": account.count("dropped"),
        "delivered_share": trained / sampled if sampled else 0.0,
    }
    return {f"agent/{name}": float(value) for name, value in counts.items()}


def _sampled(reply: Reply) -> int:
    return len(reply.completion.tokens) + len(reply.cut)
