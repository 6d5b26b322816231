"""What every sink is put through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atropos_core.interfaces import Sink


async def opened(sink: Sink, state: Mapping[str, Any] | None = None) -> Any:
    """The sink, open; with a state, as a run that resumes opens it."""
    if state is not None:
        sink.load(json.loads(json.dumps(state)))
    await sink.open()
    return sink


async def recorded(sink: Sink, steps: Mapping[int, Mapping[str, float]], state: Mapping[str, Any] | None = None) -> Any:
    """Record these {step: metrics}, and close twice; the state that it had at the end."""
    await opened(sink, state)
    for step, metrics in steps.items():
        await sink.step(step, metrics, [])
    left = sink.state()
    await sink.close()
    await sink.close()
    return left
