"""The contract of this trainer's losses: `atropos check NAME` tries one on random rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from atropos_core.interfaces import Finding
from atropos_testing.report import Report, of_error
from atropos_trainer_grpo.loss_cases import Case
from atropos_trainer_grpo.losses import Loss, Rows, Surrogate

CHECKS = (
    "computes", "shapes", "finite", "far apart", "inputs unchanged", "gradient", "split", "order", "neighbours", "zero advantages",
    "reinforces",
)  # fmt: skip
VALUE, GRADIENT = 1e-6, 1e-5  # the largest differences that count as rounding
CASES = 8
STEP = 1e-6


def check_loss(loss: Loss, *, skip: Sequence[str] = ()) -> list[Finding]:
    """Return the findings of `atropos check NAME`."""
    report = Report(CHECKS, skip)
    case = Case(loss, 0)
    rows, _ = case.rows()
    kept = [tensor.detach().clone() for tensor in (rows.logprobs, rows.old, rows.advantages)]
    problems, given = [], None
    try:
        given = loss(rows, loss.clip)
    except Exception as error:  # noqa: BLE001 - the plugin boundary: a loss's code
        problems.append(of_error(error))
    if not report.check("computes", problems, good="a value", remedy="The other checks run once it computes."):
        return report.findings
    assert given is not None
    if not report.check(
        "shapes", _shapes(given, len(rows.logprobs)), good="one value for each row, with a gradient",
        remedy="Return Surrogate(values, ratio): [R] each, the ratio detached. The trainer weights and sums them.",
    ):  # fmt: skip
        return report.findings
    after = (rows.logprobs.detach(), rows.old, rows.advantages)
    report.check(
        "inputs unchanged", [] if all(map(torch.equal, kept, after)) else ["the loss wrote to a tensor of its rows"],
        good="no input was changed", remedy="Use operations without a trailing underscore.",
    )  # fmt: skip
    cases = [Case(loss, seed) for seed in range(CASES)]
    for name, problem, good, remedy in (
        ("finite", _not_finite, "values and gradients are numbers", "Look for a division by 0, and for exp of a large number."),
        ("far apart", _overflows, "numbers also if new and old logprobs are 200 nats apart, in float32",
         "Use rows.ratio(), which is bounded, instead of (rows.logprobs - rows.old).exp()."),
        ("gradient", _wrong_slope, f"finite differences agree to {GRADIENT:g}",
         "If a factor is detached on purpose: @register(holds_fixed=True)."),
        ("split", _split, f"micro-batches add up to {VALUE:g}, {GRADIENT:g} in the gradient",
         "The result must not depend on how many rows come at once: do not take mean() over them."),
        ("order", _order, "the order of sequences changes nothing", "Use rows.sequence instead of positions."),
        ("neighbours", _neighbours, "sequences do not affect each other", "Reduce over a sequence with rows.mean_by_sequence."),
        ("zero advantages", _zero, "no advantage, no gradient", "Or skip this check if your loss has an extra term."),
        ("reinforces", _reinforces, "at ratio 1 the gradient is that of -advantage * log p",
         "A good token must become likelier, and a bad one less likely, in proportion. If your loss differs on purpose (it treats "
         "negative advantages differently, or is not a policy gradient): --skip reinforces."),
    ):  # fmt: skip
        if name == "gradient" and loss.holds_fixed:
            report.note(name, "not the slope of the value: the loss declares that it holds a factor fixed")
        else:
            report.check(name, _over(cases, problem), good=good, remedy=remedy)
        if name == "finite" and report.findings[-1].ok is False:
            return report.findings
    return report.findings


def _over(cases: Sequence[Case], problem: Callable[[Case], str]) -> list[str]:
    found = []
    for case in cases:
        try:
            found.append(problem(case))
        except Exception as error:  # noqa: BLE001 - the plugin boundary: a loss's code
            found.append(of_error(error))
    return [text for text in found if text]


def _shapes(given: object, rows: int) -> list[str]:
    if not isinstance(given, Surrogate):
        return [f"it returned a {type(given).__name__} instead of a Surrogate"]
    problems = []
    for name, tensor in zip(given._fields, given, strict=True):
        if tensor is not None and tuple(tensor.shape) != (rows,):
            problems.append(f"{name} has the shape {tuple(tensor.shape)} for {rows} rows")
    if not given.values.requires_grad:
        problems.append("values has no gradient: logprobs was detached, or not used")
    if given.ratio.requires_grad:
        problems.append("ratio has a gradient, but it is only for the metrics")
    return problems


def _not_finite(case: Case) -> str:
    value, gradient = case.ask()
    return "" if np.isfinite(value) and np.isfinite(gradient).all() else "a value or a gradient is not finite"


def _wrong_slope(case: Case) -> str:
    _, gradient = case.ask()
    slopes = np.zeros_like(gradient)
    kept = case.logprobs.copy()
    for t in range(len(kept)):
        case.logprobs[t] = kept[t] + STEP
        above, _ = case.ask()
        case.logprobs[t] = kept[t] - STEP
        below, _ = case.ask()
        case.logprobs[t] = kept[t]
        slopes[t] = (above - below) / (2 * STEP)
    apart = np.abs(slopes - gradient).max()
    return "" if apart <= GRADIENT else f"the gradient differs from the value's slope by {apart:.2g}"


def _overflows(case: Case) -> str:
    rows, weights = case.rows()
    apart = torch.tensor([0.0, 200.0, -200.0, 89.0, -89.0, 30.0])[torch.arange(len(rows.old)) % 6]
    new = (rows.old.float() + apart).requires_grad_()
    far = Rows(new, rows.old.float(), rows.advantages.float(), rows.sequence)
    given = case.loss(far, case.loss.clip)
    (given.values * weights.float()).sum().backward()
    assert new.grad is not None
    wrong = ~(given.values.detach().isfinite() & new.grad.isfinite() & given.ratio.isfinite())
    return "" if not wrong.any() else f"it is not a number at a log-ratio of {apart[wrong][0]:g}"


def _split(case: Case) -> str:
    value, gradient = case.ask()
    parts = [case.ask(chosen) for chosen in ([0], [1, 2], [3, 4, 5])]
    return _differs(value, gradient, sum(part[0] for part in parts), np.sum([part[1] for part in parts], axis=0))


def _order(case: Case) -> str:
    value, gradient = case.ask()
    return _differs(value, gradient, *case.ask([4, 0, 5, 2, 1, 3]))


def _neighbours(case: Case) -> str:
    _, alone = case.ask([2])
    case.logprobs[case.parts[3]] += 1.0
    _, beside = case.ask([2, 3])
    case.logprobs[case.parts[3]] -= 1.0
    apart = np.abs(alone[case.parts[2]] - beside[case.parts[2]]).max()
    return "" if apart <= GRADIENT else f"a neighbour changes a sequence's gradient by {apart:.2g}"


def _zero(case: Case) -> str:
    kept, case.advantages = case.advantages, np.zeros_like(case.advantages)
    _, gradient = case.ask()
    case.advantages = kept
    return "" if not np.abs(gradient).max() > GRADIENT else f"a gradient of {np.abs(gradient).max():.2g}"


def _reinforces(case: Case) -> str:
    kept, case.old = case.old, case.logprobs.copy()
    _, gradient = case.ask()
    case.old = kept
    apart = np.abs(gradient + case.weights * case.advantages).max()
    return (
        "" if apart <= GRADIENT else f"at ratio 1 the gradient differs by {apart:.2g} from that of -advantage * log p"
    )


def _differs(value: float, gradient: np.ndarray, other: float, others: np.ndarray) -> str:
    if abs(value - other) > VALUE:
        return f"the value differs by {abs(value - other):.2g}"
    apart = np.abs(gradient - others).max()
    return "" if apart <= GRADIENT else f"the gradient differs by {apart:.2g}"
