"""Run directories whose rollouts are known, without a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_core.builtin.config import JsonlOptions
from atropos_core.builtin.sinks import JsonlSink
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.types import Message, ScoredGroup
from atropos_testing.samples import make_group


async def recorded(folder: Path, *steps: Sequence[ScoredGroup], **options: object) -> Path:
    """A run directory with the rollouts of these steps, as the sink writes them."""
    return await settled(folder, *([SettledGroup(group, "trained") for group in groups] for groups in steps), **options)


async def settled(folder: Path, *steps: Sequence[SettledGroup], **options: object) -> Path:
    """The same with what became of each group."""
    folder.mkdir()
    (folder / "config.toml").write_text(
        "[sink.jsonl]\n" + "".join(f"{n} = {json.dumps(v)}\n" for n, v in options.items())
    )
    sink = JsonlSink(JsonlOptions.model_validate(options), folder)
    await sink.open()
    for step, groups in enumerate(steps, 1):
        await sink.record(StepRecord(step, {}, [one.group for one in groups], list(groups)))
    await sink.close()
    return folder


def group_of(number: int, rewards: Sequence[float], *conversations: Sequence[Message], **changes: Any) -> ScoredGroup:
    """A group whose episodes said these messages."""
    made = make_group(number, rewards)
    episodes = tuple(
        replace(episode, messages=tuple(messages), **changes)
        for episode, messages in zip(made.episodes, conversations, strict=True)
    )
    return replace(made, episodes=episodes)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}
