"""The contract of this trainer's losses: `atropos check NAME` tries one on random float64 rows.

The rows are of sequences of 1 to 12 tokens, ratios between about 0.3 and 3, advantages of either sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from atropos_core.interfaces import Finding
from atropos_testing.report import Report, of_error
from atropos_trainer_grpo.losses import Clip, Loss, Rows, Surrogate, token_weights

CHECKS = (
    "computes", "shapes", "finite", "far apart", "inputs unchanged", "gradient", "split", "order", "neighbours", "zero advantages",
    "reinforces",
)  # fmt: skip
VALUE, GRADIENT = 1e-6, 1e-5  # the largest differences that count as rounding
CASES = 8
LENGTH = 16  # for losses that average over a constant length
STEP = 1e-6


class Case:
    """Random rows, with the weights that the trainer would give them."""

    def __init__(self, loss: Loss, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.loss = loss
        self.lengths = random.integers(1, 13, 6)
        total = int(self.lengths.sum())
        self.logprobs, self.old = random.normal(-2, 0.4, total), random.normal(-2, 0.4, total)
        self.advantages = np.repeat(random.normal(size=6), self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.weights = token_weights(loss.average, np.ones(total, np.bool_), offsets, LENGTH).astype(np.float64)
        self.parts = [np.arange(first, last) for first, last in pairwise(offsets)]

    def rows(self, chosen: Sequence[int] | None = None) -> tuple[Rows, Tensor]:
        """The rows of the chosen sequences in that order, with their weights."""
        parts = [self.parts[i] for i in (range(len(self.parts)) if chosen is None else chosen)]
        at = np.concatenate(parts)
        rows = Rows(
            logprobs=torch.tensor(self.logprobs[at], requires_grad=True),
            old=torch.tensor(self.old[at]),
            advantages=torch.tensor(self.advantages[at]),
            sequence=torch.from_numpy(np.repeat(np.arange(len(parts)), [len(part) for part in parts])),
        )
        return rows, torch.tensor(self.weights[at])

    def ask(self, chosen: Sequence[int] | None = None, clip: Clip | None = None) -> tuple[float, np.ndarray]:
        """Return the value, and the gradient [R] at each token's place in this case (0 for tokens that were not chosen)."""
        rows, weights = self.rows(chosen)
        total = (self.loss(rows, clip or self.loss.clip).values * weights).sum()
        total.backward()
        gradient = np.zeros(len(self.logprobs))
        at = np.concatenate([self.parts[i] for i in (range(len(self.parts)) if chosen is None else chosen)])
        assert rows.logprobs.grad is not None
        gradient[at] = rows.logprobs.grad.numpy()
        return float(total.detach()), gradient


def heeds(loss: Loss, bound: str) -> bool:
    """True if a bound of the clip ("low", "high", "dual") changes the loss."""
    tight, wide = {"low": (0.0, 0.9), "high": (0.0, 5.0), "dual": (1.01, 100.0)}[bound]
    case = Case(loss, 0)
    (one, gradient), (other, slopes) = (case.ask(clip=loss.clip._replace(**{bound: at})) for at in (tight, wide))
    return one != other or bool((gradient != slopes).any())


def findings(loss: Loss, *, skip: Sequence[str] = ()) -> list[Finding]:
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
