"""The rows of each form: `sft`, conversations to imitate; `dpo`, pairs of replies; `parquet`, everything that is recorded.

`sft` and `dpo` are the conversational formats of TRL (https://huggingface.co/docs/trl/dataset_formats): "language modeling", and
"preference" with an explicit prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from atropos_records.groups import ExportedGroup
from atropos_records.rollout_records import EpisodeRecord
from atropos_records.selection import LeftOut, Selection, reward_of, usable
from atropos_records.step_tokens import SequenceTokens

Row = dict[str, Any]
Column = Literal[
    "string", "int64", "float64", "bool", "json", "list[json]", "list[int32]", "list[int64]", "list[bool]", "list[float]",
    "list[float64]",
]  # fmt: skip

_WHERE: dict[str, Column] = {"task": "string", "environment": "string", "step": "int64"}
SFT: dict[str, Column] = {"messages": "list[json]", "tools": "list[json]", "reward": "float64", **_WHERE}
DPO: dict[str, Column] = {
    "prompt": "list[json]", "chosen": "list[json]", "rejected": "list[json]", "tools": "list[json]",
    "score_chosen": "float64", "score_rejected": "float64",
    **_WHERE,
}  # fmt: skip
ROWS: dict[str, Column] = {
    "step": "int64", "environment": "string", "split": "string", "task": "string", "task_index": "int64", "answer": "string",
    "draw": "int64",
    "member": "int64", "outcome": "string", "dropped_by": "string", "reward": "float64", "scored_reward": "float64",
    "advantage": "float64", "score": "float64", "parts": "json", "metrics": "json", "correct": "bool", "finish": "string",
    "failed": "string", "failed_in": "string", "messages": "list[json]", "sequence": "int64", "temperature": "float64",
    "truncated": "bool", "input_ids": "list[int32]", "response_mask": "list[bool]", "loss_mask": "list[bool]",
    "logprobs": "list[float]", "policy_versions": "list[int32]", "advantages": "list[float]", "trainer_logprobs": "list[float]",
    "entropy": "list[float]", "teacher_logprobs": "list[float]", "ref_logprobs": "list[float]",
    "kept_sizes": "list[int32]", "kept_ids": "list[int32]", "turn_ends": "list[int64]", "turn_rewards": "list[float64]",
}  # fmt: skip


def sft_rows(group: ExportedGroup, selection: Selection, left_out: LeftOut) -> Iterator[Row]:
    """Yield one row per episode that is worth imitating."""
    kept = []
    for episode, messages in usable(group, selection, left_out):
        if selection.only_correct and not episode.correct:
            left_out["not correct" if episode.correct is False else "nothing says whether it is correct"] += 1
        elif selection.min_reward is not None and reward_of(episode) < selection.min_reward:
            left_out["reward below --min-reward"] += 1
        else:
            kept.append((episode, messages))
    if selection.best_per_group is not None and len(kept) > selection.best_per_group:
        left_out["not among the best of its group"] += len(kept) - selection.best_per_group
        best = sorted(range(len(kept)), key=lambda at: -reward_of(kept[at][0]))[: selection.best_per_group]
        kept = [kept[at] for at in sorted(best)]
    for episode, messages in kept:
        yield {"messages": messages, "tools": _tools(group, episode), "reward": reward_of(episode), **_where(episode)}


def dpo_rows(group: ExportedGroup, selection: Selection, left_out: LeftOut) -> Iterator[Row]:
    """Yield at most one pair: of those that differ only in their last reply, the one with the largest margin. The prompt is
    everything before. A pair that differs earlier has later messages that no policy wrote, and a preference loss would train
    them, so it is skipped."""
    kept = usable(group, selection, left_out)
    rewards = [reward_of(episode) for episode, _ in kept]
    order = sorted(itertools.permutations(range(len(kept)), 2), key=lambda pair: rewards[pair[1]] - rewards[pair[0]])
    reason = "groups with fewer than two usable rollouts" if len(kept) < 2 else "groups whose rewards are all equal"
    for better, worse in order:
        margin = rewards[better] - rewards[worse]
        if margin <= 0 or margin < selection.min_margin:
            reason = "groups without a margin of --min-margin" if margin > 0 else reason
            break
        (episode, chosen), (_, rejected) = kept[better], kept[worse]
        if chosen[:-1] != rejected[:-1] or len(chosen) < 2:
            reason = (
                "groups whose conversations part before the last reply (several turns: see --as sft --best-per-group 1)"
            )
        elif chosen[-1] == rejected[-1]:
            reason = "groups whose last replies are the same text"
        else:
            scores = {"score_chosen": rewards[better], "score_rejected": rewards[worse]}
            yield {
                "prompt": chosen[:-1],
                "chosen": chosen[-1:],
                "rejected": rejected[-1:],
                "tools": _tools(group, episode),
                **scores,
                **_where(episode),
            }
            return
    left_out[reason] += 1


def token_rows(group: ExportedGroup, selection: Selection, left_out: LeftOut) -> Iterator[Row]:
    """Yield one row per token history, with its episode; an episode without any also has one row, or one for each history that has
    turn rewards."""
    nothing: Row = dict.fromkeys(ROWS)
    for episode in group.episodes:
        row = nothing | _episode_columns(episode)
        sequences, turns = group.sequences(episode), episode.turn_rewards
        if not sequences and not turns:
            yield row
        for number in range(max(len(sequences), len(turns))):
            columns = _token_columns(sequences[number]) if number < len(sequences) else {}
            placed = turns[number] if number < len(turns) else None
            if placed is not None:
                columns |= {"turn_ends": placed.ends, "turn_rewards": placed.values}
            yield row | {"sequence": number, **columns}


FORMS: Mapping[str, tuple[Mapping[str, Column], Callable[[ExportedGroup, Selection, LeftOut], Iterator[Row]]]] = {
    "sft": (SFT, sft_rows),
    "dpo": (DPO, dpo_rows),
    "parquet": (ROWS, token_rows),
}


def _tools(group: ExportedGroup, episode: EpisodeRecord) -> list[Any] | None:
    """Return the tools as TRL passes them to the chat template, or None if there were none, or none were recorded."""
    return list(group.tools.get(episode.tools or "", ())) or None


def _where(episode: EpisodeRecord) -> Row:
    return {"task": episode.task, "environment": episode.environment, "step": episode.step}


def _episode_columns(episode: EpisodeRecord) -> Row:
    names = (
        "step", "environment", "split", "task", "task_index", "answer", "draw", "member", "outcome", "dropped_by", "reward",
        "scored_reward", "advantage", "score", "correct", "finish", "failed", "failed_in",
    )  # fmt: skip
    return {
        **{name: getattr(episode, name) for name in names},
        "parts": dict(episode.parts),
        "metrics": dict(episode.metrics),
        "messages": list(episode.messages),
    }


def _token_columns(sequence: SequenceTokens) -> Row:
    return {
        "temperature": sequence.temperature,
        "truncated": sequence.truncated,
        "input_ids": sequence.ids,
        "response_mask": sequence.sampled,
        "loss_mask": sequence.trained,
        "logprobs": sequence.logprobs,
        "policy_versions": sequence.versions,
        "advantages": sequence.advantages,
        "trainer_logprobs": sequence.trainer_logprobs,
        "entropy": sequence.entropy,
        "teacher_logprobs": sequence.teacher_logprobs,
        "ref_logprobs": sequence.ref_logprobs,
        "kept_sizes": None if sequence.kept is None else sequence.kept.sizes,
        "kept_ids": None if sequence.kept is None else sequence.kept.token_ids,
    }
