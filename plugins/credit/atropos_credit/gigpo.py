"""Group-in-Group Policy Optimization (arXiv 2505.10978): an episode against its group, and each turn against the turns of the
group that began in the same state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from atropos_credit.returns import centred
from atropos_credit.turns import Advantages, Turns, returns


def gigpo(
    group: Sequence[Turns], *, step_weight: float = 1.0, discount: float = 0.95, divide_by_std: bool = False
) -> Advantages:
    """Advantages [T] of each episode of one task: A_E + `step_weight` A_S (eq. 8).

    A_E compares the episode's score with the group's mean (eq. 3). A_S compares the discounted return from a turn (eq. 5) with
    the mean over all turns of the group in the same state (eq. 6 and 7), and is 0 for a state that only one turn was in.
    `divide_by_std` divides both by their standard deviations, the paper's F_norm = std; otherwise F_norm is 1.

    Both means include the turn itself and A_E counts what was earned before a turn, so the sum is not the gradient of the score,
    nor in proportion to it. Episodes of different length are compared as they are."""
    of_episodes = centred([one.score for one in group], divide_by_std)
    every = [returns(one.earned(), discount) for one in group]
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for at, one in enumerate(group):
        for t, state in enumerate(one.states):
            places.setdefault(state, []).append((at, t))
    made = [values * 0.0 + of_episodes[at] for at, values in enumerate(every)]
    for there in places.values():
        if len(there) == 1:
            continue
        for (at, t), value in zip(there, centred([every[at][t] for at, t in there], divide_by_std), strict=True):
            made[at][t] += step_weight * value
    return made
