"""The bounds of the checks of whole runs: each fails on the figures of a good run with one thing changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import learning, loop, vllm_run
from tests.gpu.pair import Setting
from tests.gpu.report import CheckFailed, Report

ON_A_GPU = Setting("cuda:0")  # the bounds are only read: nothing runs there


def learned(bridge: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": step, "alignment/max_abs_logprob_diff": 0.1, "bridge/bytes_copied": 0, "time/step_s": 0.5}
        for step in range(learning.STEPS[bridge] + 1)
    ]
    for line in lines[1:]:
        line["reward/mean"] = 0.5
    for line, accuracy in ((lines[0], 0.28), (lines[-1], 0.94)):
        line |= {"eval/accuracy": accuracy, "eval/problems": 71, "eval/answered": 1.0, "eval/failed": 0.0}
    return lines


def judge_learned(lines: list[dict[str, Any]], bridge: str) -> Report:
    report = Report(print)
    learning.judge(ON_A_GPU, report, lines, bridge)
    report.settle()
    return report


@pytest.mark.parametrize("bridge", ["ipc", "lora"])
def test_a_run_that_learned_holds_and_its_curve_is_kept(bridge: str) -> None:
    curve = judge_learned(learned(bridge), bridge).figures["curve: step, reward, held-out accuracy, seconds"]
    assert curve[0] == [0, None, 0.28, 0.5]
    assert curve[-1] == [learning.STEPS[bridge], 0.5, 0.94, 0.5]


@pytest.mark.parametrize(
    ("at", "changed", "named"),
    [
        (-1, {"eval/accuracy": 0.77}, "accuracy gained: 49 points"),
        (50, {"alignment/max_abs_logprob_diff": 0.51}, "alignment, worst step: 0.51"),
        (50, {"alignment/max_abs_logprob_diff": float("nan")}, "alignment, worst step: nan"),
        (50, {"bridge/bytes_copied": 4}, "nothing copied: 4 bytes"),
        (50, {"step": 0}, "steps: 99 of 100"),
    ],
)
def test_a_run_fails_if_it_learned_too_little_or_differs_at_one_step(
    at: int, changed: dict[str, Any], named: str
) -> None:
    lines = learned("ipc")
    lines[at] |= changed
    with pytest.raises(CheckFailed, match=named):
        judge_learned(lines, "ipc")


def test_a_step_without_a_logprob_to_compare_fails() -> None:
    lines = learned("lora")
    del lines[7]["alignment/max_abs_logprob_diff"]
    with pytest.raises(CheckFailed, match="alignment, worst step: nan"):
        judge_learned(lines, "lora")


def judge_loops(**of_trl: float) -> Report:
    work = loop.Loop()
    good = loop.figures_of(work, step_s=4.0, sampling_s=2.0, tokens=256.0 * work.rollouts, peak_bytes=2e10)
    slow = loop.figures_of(work, step_s=8.0, sampling_s=2.0, tokens=256.0 * work.rollouts, peak_bytes=2e10)
    report = Report(print)
    loop.judge(report, work, "Atropos", good)
    loop.judge(report, work, "TRL", slow | of_trl)
    loop.compare(report, {"Atropos": good}, {"TRL": slow})
    report.settle()
    return report


def test_loops_of_equal_replies_are_compared() -> None:
    figures = judge_loops().figures
    assert figures["Atropos: trajectories/s"] == 32
    assert figures["Atropos: tokens/s, sampling"] == figures["Atropos: tokens/s, update"] == 16384
    assert figures["Atropos: trajectories/s over TRL (the goal is 1.5) [times]"] == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"tokens of a reply": 250.0}, "TRL: replies shorter than 256 tokens"), ({"peak, GB": 0.0}, "TRL: memory")],
)
def test_loops_of_other_lengths_or_without_a_measured_memory_fail(changed: dict[str, float], named: str) -> None:
    with pytest.raises(CheckFailed, match=named):
        judge_loops(**changed)


def sampled(kind: vllm_run.Kind) -> list[dict[str, Any]]:
    line: dict[str, Any] = {"alignment/max_abs_logprob_diff": 0.1, "bridge/bytes_copied": 0, "eval/accuracy": 0.4}
    trained = line | {"time/step_s": 0.5}
    if kind == "fp8":
        trained |= {"correction/gap": 0.02, "correction/fraction": 0.001, "bridge/bytes_copied": 10**6}
    if kind == "ngram":
        trained |= {"engine/draft_acceptance": 0.3}
    return [
        {**line, "step": 0},
        *({**trained, "step": step} for step in range(1, 16)),
        {**trained, "step": 16, "eval/accuracy": 0.5},
    ]


def judge_sampled(lines: list[dict[str, Any]], kind: vllm_run.Kind) -> None:
    report = Report(print)
    vllm_run.judge(ON_A_GPU, report, lines, kind)
    report.settle()


@pytest.mark.parametrize("kind", ["plain", "fp8", "ngram"])
def test_a_run_with_vllm_that_learned_holds(kind: vllm_run.Kind) -> None:
    judge_sampled(sampled(kind), kind)


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        ("plain", {"alignment/max_abs_logprob_diff": float("nan")}, "alignment, worst step: nan"),
        ("plain", {"bridge/bytes_copied": 4}, "nothing copied: 4 bytes"),
        ("plain", {"eval/accuracy": 0.44}, "accuracy gained: 4 points"),
        ("fp8", {"correction/gap": 0.0}, "least step: 0 nats"),  # nothing was rounded
        ("fp8", {"correction/gap": 0.6}, "worst step: 0.6 nats"),
        ("fp8", {"correction/gap": float("nan")}, "worst step: nan"),
        ("ngram", {"alignment/max_abs_logprob_diff": 0.6}, "alignment, worst step: 0.6"),
    ],
)
def test_a_run_with_vllm_fails_if_one_figure_is_beyond_its_bound(
    kind: vllm_run.Kind, changed: dict[str, Any], named: str
) -> None:
    lines = sampled(kind)
    lines[-1] |= changed
    with pytest.raises(CheckFailed, match=named):
        judge_sampled(lines, kind)


def test_a_run_in_which_no_proposal_is_accepted_fails() -> None:
    lines = [{**line, "engine/draft_acceptance": 0.0} for line in sampled("ngram")]
    with pytest.raises(CheckFailed, match="steps with accepted proposals: 0"):
        judge_sampled(lines, "ngram")
