"""Recognise a repeated body whose groups were stored but whose sender may not know it, so that they are not stored twice.

An old client sends no key: it repeats the whole request if no answer comes. A body counts as repeated only if its answer could not be
delivered, or if the server was killed moments after storing it. Otherwise an environment may send the same group twice on purpose.
The hub's keys say what was stored and when, so nothing else must be written.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

REMEMBERED_S = 300.0
MOST = 10_000
SLOT_S = 5.0  # time resolution of a key; what is in the last two slots may not have been answered


def digest(*parts: bytes) -> str:
    made = hashlib.sha256()  # with hardware support, half the time of blake2b
    for part in parts:
        made.update(part)
    return made.hexdigest()[:32]


class Retries:
    """For each digest of a body: how many of its items are stored. `killed_at`: when the previous server last wrote, if it was
    killed; `knows`: returns True if a group with that key is stored; `hold_s`: how long after its key was made a group may be
    stored."""

    def __init__(
        self,
        knows: Callable[[str], bool],
        killed_at: float | None = None,
        hold_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._knows = knows
        self._clock = clock
        self._killed_slot = None if killed_at is None else int(killed_at / SLOT_S)
        self._held_slots = 2 + int(hold_s / SLOT_S)
        self._started = clock()
        self._stored: dict[str, tuple[int, float]] = {}
        self._seen: set[str] = set()  # from before this process
        self._begin_slot(0)

    def new_key(self, body_digest: str, item: int = 0, *, held: bool = False) -> str:
        """A key for one group that is stored now, or, if `held`, when there is room."""
        slot = int(self._clock() / SLOT_S)
        if slot != self._slot:
            self._begin_slot(slot)
        what = _what(body_digest, item, held)
        if unused := self._unused.get(what):
            return _key(slot, what, heappop(unused))
        self._in_slot[what] += 1
        return _key(slot, what, self._in_slot[what] - 1)

    def give_back(self, key: str) -> None:
        """Reuse a key under which nothing was stored for the next equal body: the next server looks only for the first key of a slot."""
        slot, _, rest = key.removeprefix("old-").partition("-")
        what, _, number = rest.rpartition("-")
        if int(slot) == self._slot:
            heappush(self._unused[what], int(number))

    def _begin_slot(self, slot: int) -> None:
        self._slot, self._in_slot, self._unused = slot, Counter[str](), defaultdict[str, list[int]](list)

    def remember(self, body_digest: str, items: int) -> None:
        self._stored.pop(body_digest, None)
        self._stored[body_digest] = (items, self._clock() + REMEMBERED_S)
        while len(self._stored) > MOST:
            del self._stored[next(iter(self._stored))]

    def forget(self) -> None:
        """Called when all groups are dropped: a body that is sent again is stored again."""
        self._stored.clear()
        self._killed_slot = None

    def take(self, body_digest: str, items: int) -> int:
        """How many of its items are already stored. This can be read once: the next such body is a new one."""
        stored, until = self._stored.pop(body_digest, (0, 0.0))
        if until > self._clock():
            return stored
        return self._from_before(body_digest, items)

    def _from_before(self, body_digest: str, items: int) -> int:
        if self._killed_slot is None:
            return 0
        if self._clock() - self._started > REMEMBERED_S:
            self._killed_slot, self._seen = None, set()
            return 0
        if body_digest in self._seen:
            return 0
        self._seen.add(body_digest)
        for item in reversed(range(items)):
            for held, slots in ((False, 2), (True, self._held_slots)):
                what = _what(body_digest, item, held)
                # a file's time may be some milliseconds before the clock's: the key may be from the slot after it
                if any(self._knows(_key(self._killed_slot - back, what, 0)) for back in range(-1, slots)):
                    return item + 1
        return 0


def _what(body_digest: str, item: int, held: bool) -> str:
    return f"{body_digest}-{item}{'-held' if held else ''}"


def _key(slot: int, what: str, number: int) -> str:
    return f"old-{slot}-{what}-{number}"
