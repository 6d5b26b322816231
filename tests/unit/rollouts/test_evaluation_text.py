"""The words for what an evaluation came to."""

from __future__ import annotations

from atropos_core.rollouts.evaluation_text import held_out, held_out_change


def test_what_an_evaluation_came_to_is_accuracy_or_else_reward_and_by_environment_where_there_are_several() -> None:
    before = {"eval/problems": 8.0, "eval/reward": 0.25, "eval/accuracy": 0.5, "eval/sums/accuracy": 0.5, "eval/sums/reward": 0.5,
              "eval/poems/reward": -0.125, "eval/accuracy_strict": 0.25}  # fmt: skip
    after = before | {"eval/reward": 0.5, "eval/accuracy": 0.75, "eval/poems/reward": 0.25, "eval/sums/accuracy": 0.75}
    assert held_out_change(before, after) == [
        "held-out accuracy 50.0% -> 75.0% (+25.0 points, 8 problems)",
        "  strict: 25.0% -> 25.0%",
        "  sums: accuracy 50.0% -> 75.0%",
        "  poems: reward -0.125 -> 0.250",
    ]
    assert held_out_change({}, after) == [], "there was no evaluation before training"
    assert held_out_change(
        {"eval/problems": 2.0, "eval/reward": 0.25}, {"eval/problems": 2.0, "eval/reward": 0.125}
    ) == ["held-out reward 0.250 -> 0.125 (-0.125, 2 problems)"]


def test_rollouts_of_an_evaluation_that_failed_are_named() -> None:
    """Each counts as wrong, and the policy may be innocent."""
    failed = {"eval/problems": 8.0, "eval/reward": 1.0, "eval/accuracy": 0.5, "eval/failed": 4.0}
    assert held_out(failed) == "held-out accuracy 50.0% on 8 problems, 4 rollouts failed and count as wrong"
    one = {"eval/problems": 8.0, "eval/reward": 1.0, "eval/failed": 1.0}
    assert held_out(one) == "held-out reward 1.000 on 8 problems, 1 rollout failed"
    assert held_out_change(failed, failed) == [
        "held-out accuracy 50.0% -> 50.0% (+0.0 points, 8 problems, 4 rollouts failed and count as wrong)"
    ]
