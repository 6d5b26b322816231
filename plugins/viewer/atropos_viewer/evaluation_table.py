"""The problems of one evaluation as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atropos_records.rollout_records import EvaluatedProblem
from atropos_viewer.page_values import number, text_of


def evaluation_table(problems: Sequence[EvaluatedProblem]) -> dict[str, Any]:
    """A problem a row; `question` and `reply` are the last messages of user and model in its first sample. `correct` is null where
    no sample's score says what is right; `cut` is how many samples reached max_tokens."""
    return {
        "task": [one.task for one in problems],
        "environment": [one.environment for one in problems],
        "correct": [one.correct if _graded(one) else None for one in problems],
        "total": [one.total for one in problems],
        "reward": [_mean([sample.reward for sample in one.samples if sample.reward is not None]) for one in problems],
        "failed": [next((sample.failed for sample in one.samples if sample.failed), "") for one in problems],
        "cut": [sum(sample.finish == "length" for sample in one.samples) for one in problems],
        "question": [_last(one, "user") for one in problems],
        "reply": [_last(one, "assistant") for one in problems],
    }


def _graded(problem: EvaluatedProblem) -> bool:
    return any(sample.correct is not None for sample in problem.samples)


def _mean(values: Sequence[float]) -> float | None:
    return number(sum(values) / len(values)) if values else None


def _last(problem: EvaluatedProblem, role: str) -> str:
    said = [message for one in problem.samples[:1] for message in one.messages if message.get("role") == role]
    return text_of(said[-1]) if said else ""
