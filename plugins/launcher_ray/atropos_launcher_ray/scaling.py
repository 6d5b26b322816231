"""Choose the number of workers by how long the loop waits for groups."""

from __future__ import annotations

MORE_SHARE, FEWER_SHARE = 0.25, 0.1  # of the loop's time that it waits; between them the number stays the same
STEPS = 3  # least number of steps for a decision
MOST_LOOKS = 32  # in a row in which the loop hardly waited, before the number shrinks


class Scale:
    """The number of one environment's workers. It grows and shrinks by half. If fewer were too few, the next reduction needs twice as
    many looks, so that it settles."""

    def __init__(self, least: int, most: int, look_s: float) -> None:
        self.wanted = least
        self._least, self._most, self._look_s = least, most, look_s
        self._steps, self._waited_s, self._lasted_s = 0, 0.0, 0.0
        self._idle_looks, self._needed_looks = 0, 1
        self._shrank_last = False

    def step_ended(self, waited_s: float, lasted_s: float, *, all_run: bool) -> float | None:
        """Return the share of time that the loop waited, if it changed `wanted`. Steps in which some workers did not run are
        ignored."""
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
