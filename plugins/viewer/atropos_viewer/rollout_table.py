"""The rollouts of one step as columns, for lists of ten thousand, and the results of their tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_records.rollout_records import EpisodeRecord
from atropos_records.step_tokens import TokenFile
from atropos_viewer.page_values import coded, number, text_of, tool_calls

PREVIEW = 120  # characters of a rollout's last message
RESULT = 160  # characters of a tool's result
COMMONEST = 3  # results that are shown for each tool


def table(episodes: Sequence[EpisodeRecord], tokens: TokenFile | None) -> dict[str, Any]:
    """In the order of the file."""
    return {
        "count": len(episodes),
        "task": coded(one.task for one in episodes),
        "environment": coded(one.environment for one in episodes),
        "draw": [one.draw for one in episodes],
        "reward": [number(one.reward) for one in episodes],
        "advantage": [number(one.advantage) for one in episodes],
        "correct": [one.correct for one in episodes],
        "finish": coded("failed" if one.failed else one.finish or "" for one in episodes),
        "failed": coded(_failed(one) for one in episodes),
        "tokens": [one.sampled_tokens for one in episodes],
        "turns": [sum(message.get("role") == "assistant" for message in one.messages) for one in episodes],
        "left_out": coded(why_left_out(episodes)),
        "oldest": [min(one.versions, default=None) for one in episodes],
        "newest": [max(one.versions, default=None) for one in episodes],
        "preview": [_preview(one) for one in episodes],
        "tools": tools(episodes),
        **(of_tokens(tokens, len(episodes)) if tokens is not None else {}),
    }


def of_tokens(tokens: TokenFile, count: int) -> dict[str, Any]:
    """For each rollout: the number of sampled tokens that are trained, and the mean and largest difference between trainer and
    engine on them, in nats."""
    column = {name: tokens.column(name) for name in ("episodes", "sampled", "trained", "logprobs", "trainer_logprobs")}
    episodes, sampled = np.asarray(column["episodes"]), np.asarray(column["sampled"])
    of = np.repeat(episodes, np.diff(tokens.offsets))  # [N]
    trained = np.bincount(of[sampled & np.asarray(column["trained"])], minlength=count)
    recorded = np.isin(np.arange(count), episodes)
    found: dict[str, Any] = {
        "trained": [int(one) if is_there else None for one, is_there in zip(trained, recorded, strict=True)]
    }
    if column["trainer_logprobs"] is not None:
        gap = np.abs(column["trainer_logprobs"] - np.asarray(column["logprobs"]))
        found |= _gaps(gap, of, sampled & np.isfinite(gap), count)
    return found


def _gaps(gap: NDArray[Any], of: NDArray[Any], known: NDArray[np.bool_], count: int) -> dict[str, Any]:
    counts = np.bincount(of[known], minlength=count)
    sums = np.bincount(of[known], weights=gap[known], minlength=count)
    most = np.zeros(count)
    np.maximum.at(most, of[known], gap[known])
    means = [number(total / n) if n else None for total, n in zip(sums.tolist(), counts.tolist(), strict=True)]
    return {"gap": means, "gap_most": [number(m) if n else None for m, n in zip(most.tolist(), counts, strict=True)]}


def why_left_out(episodes: Sequence[EpisodeRecord]) -> list[str]:
    """For each rollout, why its group was not trained on; empty if it was. If the run recorded no reason, it is inferred from
    the rewards."""
    members: dict[int, list[EpisodeRecord]] = {}
    for one in episodes:
        members.setdefault(one.draw, []).append(one)
    reasons = {draw: _reason(group) for draw, group in members.items()}
    return [reasons[one.draw] for one in episodes]


def _reason(group: Sequence[EpisodeRecord]) -> str:
    outcome, by = group[0].outcome, group[0].dropped_by
    ended = [one for one in group if not one.failed]
    equal = len({one.reward for one in ended}) <= 1
    if outcome == "trained":
        return ""
    if outcome is not None:
        said = {"flat": "all rewards are equal", "stale": "too old", "failed": "too few of its rollouts ended"}
        return said.get(outcome, outcome) + (f" ({by})" if by else "")
    if not ended:
        return "every rollout failed"
    if any(one.advantage is not None for one in ended):
        return ""
    return "all rewards are equal" if equal else "too old, or dropped by a transform (the reason was not recorded)"


def tools(episodes: Sequence[EpisodeRecord]) -> list[dict[str, Any]]:
    """For each tool: how often it was called, in how many rollouts, and its most common results."""
    calls: Counter[str] = Counter()
    rollouts: Counter[str] = Counter()
    results: dict[str, Counter[str]] = {}
    for one in episodes:
        named: dict[str, str] = {}
        used: set[str] = set()
        for message in one.messages:
            for call_id, name in tool_calls(message):
                named[call_id] = name
                calls[name] += 1
                used.add(name)
            if message.get("role") == "tool":
                name = _tool_of(message, named)
                results.setdefault(name, Counter())[text_of(message).strip()[:RESULT]] += 1
                used.add(name)
        rollouts.update(used)
    return [
        {
            "name": name,
            "calls": calls[name],
            "rollouts": rollouts[name],
            "results": sum(results.get(name, {}).values()),
            "distinct": len(results.get(name, ())),
            "commonest": [[text, count] for text, count in results.get(name, Counter()).most_common(COMMONEST)],
        }
        for name in sorted(rollouts)
    ]


def _tool_of(message: Mapping[str, Any], named: Mapping[str, str]) -> str:
    return str(message.get("name") or named.get(str(message.get("tool_call_id", "")), "") or "tool")


def _failed(one: EpisodeRecord) -> str:
    return f"{one.failed_in}: {one.failed}" if one.failed and one.failed_in else one.failed


def _preview(one: EpisodeRecord) -> str:
    return " ".join(text_of(one.messages[-1])[: 2 * PREVIEW].split())[:PREVIEW] if one.messages else ""
