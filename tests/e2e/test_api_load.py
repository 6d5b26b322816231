"""A producer ten times faster than the trainer: memory stays, nothing is dropped unannounced, nobody starves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.overload import missed, overload


@pytest.mark.slow
def test_ten_times_too_many_groups_cost_neither_memory_nor_groups_nor_anyones_share(tmp_path: Path) -> None:
    found = overload(tmp_path, seconds=20.0)
    print(found)
    assert missed(found) == []
