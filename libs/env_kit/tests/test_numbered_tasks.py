from __future__ import annotations

import pytest

from atropos_core.types import Task
from atropos_env_kit.numbered_tasks import NumberedTasks


def test_tasks_are_made_by_their_number_and_read_as_a_list_is():
    made = NumberedTasks(5, lambda number: Task(f"train-{number}", ({"role": "user", "content": str(number)},)))
    listed = [Task(f"train-{number}", ({"role": "user", "content": str(number)},)) for number in range(5)]
    assert list(made) == listed
    for index in (0, 4, -1, -5):
        assert made[index] == listed[index]
    for part in (slice(1, 3), slice(None, None, -2), slice(3, 99), slice(-2, None)):
        assert list(made[part]) == listed[part]
    for beyond in (5, -6):
        with pytest.raises(IndexError):
            made[beyond]
