"""What a checkpoint holds of the parts of a run: their state at the end of a step, whoever remembers it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from atropos_core.training.snapshot import Progress, Snapshot


class Small:
    def __init__(self) -> None:
        self.value = 0

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def load(self, state: Any) -> None:
        self.value = state["value"]


class Large(Small):
    """Remembers the end of a step itself; `requests` is how often its whole state was written down."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.then = -1

    def state(self) -> dict[str, Any]:
        self.requests += 1
        return super().state()

    def take_snapshot(self) -> None:
        self.then = self.value

    def snapshot(self) -> dict[str, Any]:
        self.requests += 1
        return {"value": self.then}


def snapshot(**parts: Small) -> Snapshot:
    named = cast(Any, SimpleNamespace(stateful=lambda: parts))
    return Snapshot(named, cast(Any, SimpleNamespace(state=lambda: {"hub": 1})))


def test_every_part_is_saved_as_it_was_when_the_step_ended_and_a_sink_as_it_is():
    parts = {"curriculum": Large(), "transform.t": Small(), "sink.s": Small()}
    one = snapshot(**parts)
    for step in range(3):
        for part in parts.values():
            part.value = step
        one.take(Progress(step=step))
    for part in parts.values():
        part.value = 100  # half a step further
    assert one.state() == {
        "progress": vars(Progress(step=2)),
        "source": {"hub": 1},
        "parts": {"curriculum": {"value": 2}, "transform.t": {"value": 2}, "sink.s": {"value": 100}},
    }
    json.dumps(one.state())


def test_a_large_state_is_written_down_only_for_a_checkpoint():
    large = Large()
    one = snapshot(curriculum=large)
    for step in range(50):
        one.take(Progress(step=step))
    assert large.requests == 0
    one.state()
    assert large.requests == 1
