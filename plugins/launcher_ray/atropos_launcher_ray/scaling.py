"""How many workers there should be, by how long the loop waits for groups."""

from __future__ import annotations

MORE_SHARE, FEWER_SHARE = 0.25, 0.1  # of its time that the loop waits; between them the number stays as it is
STEPS = 3  # that decide, at least
MOST_LOOKS = 32  # in a row in which the loop hardly waited, before there are fewer


class Scale:
    """Of one environment. Grows and shrinks by half of what there is. Where fewer were too few, it takes twice as many looks until
    there are fewer again, so that it settles."""

    def __init__(self, least: int, most: int, look_s: float) -> None:
        self.wanted = least
        self._least, self._most, self._look_s = least, most, look_s
        self._steps, self._waited_s, self._lasted_s = 0, 0.0, 0.0
        self._idle_looks, self._needed_looks = 0, 1
        self._shrank_last = False

    def step_ended(self, waited_s: float, lasted_s: float, *, all_run: bool) -> float | None:
        """The share that the loop has waited, where `wanted` has changed by it. Steps in which not all of the workers ran say nothing of
        how many there should be."""
        if not all_run:
            self._steps, self._waited_s, self._lasted_s = 0, 0.0, 0.0
            return None
        self._steps, self._waited_s, self._lasted_s = (
            self._steps + 1,
            self._waited_s + waited_s,
            self._lasted_s + lasted_s,
        )
        if self._steps < STEPS or self._lasted_s < self._look_s:
            return None
        share, before = self._waited_s / self._lasted_s, self.wanted
        self._steps, self._waited_s, self._lasted_s = 0, 0.0, 0.0
        self._idle_looks = self._idle_looks + 1 if share < FEWER_SHARE else 0
        if share > MORE_SHARE:
            self.wanted = min(self._most, -(-self.wanted * 3 // 2))
        elif self._idle_looks >= self._needed_looks:
            self.wanted = max(self._least, self.wanted * 2 // 3)
            self._idle_looks = 0
        if self.wanted == before:
            return None
        if self.wanted > before and self._shrank_last:
            self._needed_looks = min(2 * self._needed_looks, MOST_LOOKS)
        self._shrank_last = self.wanted < before
        return share
