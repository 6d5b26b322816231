"""Groups of rollouts for exports: from a run's records, or from live rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from atropos_core.builtin.recording import rows, token_columns, tools_id
from atropos_core.errors import DataError
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.types import ScoredGroup
from atropos_records.rollout_records import EpisodeRecord, RolloutRecords, episode_record
from atropos_records.step_tokens import SequenceTokens, sequences_of


@dataclass(frozen=True)
class ExportedGroup:
    """The episodes of one draw, including failed ones."""

    step: int  # 0 of live rollouts
    episodes: Sequence[EpisodeRecord]
    sequences: Callable[[EpisodeRecord], Sequence[SequenceTokens]]  # reads them; none if no tokens are recorded
    why_no_tokens: str = ""  # empty if there are tokens
    tools: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)  # by EpisodeRecord.tools


def recorded_groups(records: RolloutRecords, steps: Sequence[int] = ()) -> Iterator[ExportedGroup]:
    """Yield groups of these steps, or of all, in order, with one step in memory at a time. Raises DataError if a step is not recorded,
    or nothing is."""
    recorded = records.steps()
    if not recorded:
        raise DataError(
            f"{records.directory} has no recorded rollouts.",
            remedy="A run records them with [sink.jsonl] and rollouts_every above 0; live ones: atropos process --as ...",
        )
    tools = records.tools()
    for number in sorted(set(steps)) or recorded:
        step = records.step(number)
        by_draw = sorted(step.episodes, key=lambda episode: episode.draw)
        for _, members in groupby(by_draw, key=lambda episode: episode.draw):
            yield ExportedGroup(number, list(members), step.sequences, step.why_no_tokens, tools)


def live_group(group: ScoredGroup, tools: tuple[Mapping[str, Any], ...] = ()) -> ExportedGroup:
    """Make a group that was not trained: tokens count as trained if a loss would count them. `tools`: shown to the policy."""
    settled = [SettledGroup(group, None, tools=tools)]
    lines = [json.loads(json.dumps(row, default=str)) for row in rows(settled, tokens=True)]
    episodes = [episode_record(f"draw {group.draw.id}", 0, number, line) for number, line in enumerate(lines)]
    columns = token_columns(StepRecord(0, {}, [group], settled))
    sequences = sequences_of(columns) if columns is not None else []
    known = {tools_id(tools): tools} if tools else {}
    return ExportedGroup(0, episodes, lambda episode: [sequences[number] for number in episode.sequences], tools=known)
