"""Missing ratings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError

Ratings = NDArray[np.float64]  # NaN: missing


class MissingRatings(DataError):
    """Some episodes of a group have no rating. `ratings` [G] has the others, and NaN for the missing ones. An ensemble uses
    them; elsewhere the group fails with this message."""

    def __init__(self, who: str, ratings: Sequence[float] | NDArray[Any], causes: Sequence[str]) -> None:
        self.ratings: Ratings = np.asarray(ratings, np.float64)
        different = list(dict.fromkeys(causes))
        more = f" (and {len(different) - 1} other causes)" if len(different) > 1 else ""
        super().__init__(
            f"{who}: {int(np.isnan(self.ratings).sum())} of {len(self.ratings)} episodes have no rating: {different[0]}{more}"
        )
