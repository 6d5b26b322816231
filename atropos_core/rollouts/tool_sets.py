"""Remember which tools the policy was shown for each task, by a template or an API."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

Tools = tuple[Mapping[str, Any], ...]
Task = tuple[int, str]  # id() of its environment, and its own
MOST_TASKS, MOST_SETS, MOST_BYTES = 20_000, 256, 100_000  # that are remembered; of one set, as JSON


class ToolSets:
    """Keeps each set once, however many tasks have it. Sets beyond the limits are not remembered."""

    def __init__(self) -> None:
        self._sets: dict[str, Tools] = {}
        self._of: OrderedDict[Task, Tools] = OrderedDict()

    def note(self, task: Task, tools: Sequence[Mapping[str, Any]]) -> None:
        """Remember a task's tools. Does nothing if there are none, or they are not JSON."""
        if not tools:
            return
        try:
            text = json.dumps(list(tools))  # in their own order: a template writes them so
        except (TypeError, ValueError):
            return
        if text not in self._sets:
            if len(self._sets) >= MOST_SETS or len(text) > MOST_BYTES:
                return
            self._sets[text] = tuple(json.loads(text))
        self._of[task] = self._sets[text]
        self._of.move_to_end(task)
        if len(self._of) > MOST_TASKS:
            self._of.popitem(last=False)

    def of(self, task: Task) -> Tools:
        """Return a task's tools; empty if none were shown or remembered."""
        return self._of.get(task, ())
