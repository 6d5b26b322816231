"""Numbers of one row of SkyRL's batch without a copy: a list to Python, an array to numpy and torch.

SkyRL's types say lists, but it mostly passes them to numpy or torch, which read a list number by number. Making lists of a
row's ids and mask and reading them again takes several times as long as all other work on the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NumberList(np.ndarray):
    """An array [T] that behaves like the list of its numbers: `of(array)` is a view of it.

    It is true if it is not empty, `+` joins, `==` compares the whole, and iteration gives numbers. It cannot grow, and a view
    of a message is read-only."""

    __slots__ = ()
    __hash__ = None  # as of a list

    @classmethod
    def of(cls, array: NDArray[Any]) -> NumberList:
        return array.view(cls)

    def __bool__(self) -> bool:
        return self.size > 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return found.item() if isinstance(found, np.generic) else found

    def __contains__(self, value: Any) -> bool:
        return value in self.tolist()

    def __eq__(self, other: Any) -> Any:
        if isinstance(other, (list, NumberList)):
            return self.tolist() == list(other)
        return NotImplemented

    def __ne__(self, other: Any) -> Any:
        return not equal if (equal := self.__eq__(other)) is not NotImplemented else NotImplemented

    def __add__(self, other: Any) -> Any:
        return self.tolist() + list(other) if isinstance(other, (list, NumberList)) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + self.tolist() if isinstance(other, list) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return self.tolist() * times

    __rmul__ = __mul__
