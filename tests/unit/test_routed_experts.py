"""The experts that computed each token, on their way from an engine to a batch: records, frames, schema, conversations, files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core import codec
from atropos_core.builtin import recording
from atropos_core.codec.columns import GroupColumns
from atropos_core.conversation import Conversation
from atropos_core.errors import DataError
from atropos_core.group_schema import check_group
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.stop_texts import first_tokens
from atropos_core.storage.token_file import write_token_file
from atropos_core.training.batch import to_batch
from atropos_core.types import (
    EXPERTS,
    Completion,
    Draw,
    Episode,
    Kept,
    Rollout,
    RoutedExperts,
    Sampling,
    Score,
    ScoredGroup,
    Task,
    Tokens,
    tokens,
)
from tests.unit.parts import TOKENIZER, SayingEngine

LAYERS, CHOSEN = 3, 2


def routed(known: Sequence[int], first: int = 0, dtype: Any = np.uint8) -> RoutedExperts:
    """Experts of positions `known`; the numbers of a position differ from all others, and from those of another `first`."""
    count = sum(known)
    numbers = first + np.arange(count * LAYERS * CHOSEN).reshape(count, LAYERS, CHOSEN)
    return RoutedExperts(np.array(known, np.bool_), numbers.astype(dtype))


def equal(one: RoutedExperts | None, other: RoutedExperts | None) -> bool:
    if one is None or other is None:
        return one is other
    same = one.numbers.dtype == other.numbers.dtype and one.numbers.shape == other.numbers.shape
    return same and one.known.tolist() == other.known.tolist() and one.numbers.tolist() == other.numbers.tolist()


def rollout(experts: RoutedExperts | None = None, **changes: Any) -> Rollout:
    mask = np.array([False, False, True, True])
    logprobs = np.array([0, 0, -0.5, 0], np.float32)
    made = Rollout(tokens([5, 6, 7, 8]), mask, mask, logprobs, np.zeros(4, np.int32), 1.0, experts=experts)
    return replace(made, **changes)


def group(*rollouts: Rollout) -> ScoredGroup:
    episodes = tuple(Episode((one,), 1.0) for one in rollouts)
    return ScoredGroup(
        Draw(1, "e", "train", 0, 3), Task("t", ()), episodes, np.ones(len(rollouts), np.float32),
        advantages=np.ones(len(rollouts), np.float32),
    )  # fmt: skip


def completion(count: int, experts: RoutedExperts | None = None, kept: Kept | None = None) -> Completion:
    ids, zeros = tokens(range(1, count + 1)), np.zeros(count, np.float32)
    return Completion(ids, zeros, np.zeros(count, np.int32), "length", 1.0, kept is not None, kept, experts)


SOME = routed([1, 1, 1, 0])
WIDE = routed([1, 0, 1, 1], 300, np.uint16)


# -- the record


def test_a_part_has_the_experts_of_the_first_positions() -> None:
    cut = WIDE.part(3)
    assert cut.known.tolist() == [True, False, True] and cut.numbers.tolist() == WIDE.numbers[:2].tolist()
    assert equal(WIDE.part(4), WIDE) and WIDE.part(0).numbers.shape == (0, LAYERS, CHOSEN)


def test_where_parts_overlap_the_first_counts() -> None:
    first, second = routed([1, 1, 0]), routed([1, 1, 1, 1, 0], 100)
    made = RoutedExperts.joined(6, [first, None, second])
    assert made is not None and made.known.tolist() == [True] * 4 + [False] * 2
    assert made.numbers.tolist() == [*first.numbers.tolist(), *second.numbers[2:4].tolist()]
    assert made.numbers.dtype == np.uint8
    assert RoutedExperts.joined(6, [None, None]) is None
    short = RoutedExperts.joined(2, [second])
    assert short is not None and equal(short, second.part(2)), "of a history that was cut"


def test_parts_of_other_layers_or_experts_are_not_joined() -> None:
    for shape in ((2, LAYERS + 1, CHOSEN), (2, LAYERS, CHOSEN + 1)):
        other = RoutedExperts(np.array([True, True]), np.zeros(shape, np.uint8))
        with pytest.raises(DataError, match="come from models with other layers or experts"):
            RoutedExperts.joined(4, [SOME, other])


def test_numbers_of_two_widths_are_joined_in_the_wider_one() -> None:
    for parts in ([SOME, routed([1, 1, 1, 1], 300, np.uint16)], [routed([1, 0, 0, 0], 300, np.uint16), SOME]):
        made = RoutedExperts.joined(4, parts)
        assert made is not None and made.numbers.dtype == np.uint16 and made.numbers.max() >= 300


@pytest.mark.parametrize(
    ("known", "shape"),
    [([1, 1, 0], (3, 2, 2)), ([1, 1, 0], (1, 2, 2)), ([1, 1, 0], (2, 2)), ([1, 1, 0], (2, 0, 2)), ([1, 1, 0], (2, 2, 0)),
     ([[1, 1]], (2, 2, 2))],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_not_those_of_the_known_positions_are_refused(known: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="routed experts must be"):
        RoutedExperts(np.array(known, np.bool_), np.zeros(shape, np.uint8))


def test_experts_of_another_number_of_positions_than_the_rollout_has_tokens_are_refused() -> None:
    for known in ([1, 1, 0], [1, 1, 1, 1, 0]):
        with pytest.raises(DataError, match=f"routed experts of {len(known)} positions, but there are 4 tokens"):
            rollout(routed(known))


def test_memory_of_experts_counts() -> None:
    assert rollout(WIDE).size_bytes - rollout().size_bytes == 4 + 2 * 3 * LAYERS * CHOSEN


# -- frames


def fields_of(frame: bytes, mark: str = "~f") -> list[Any]:
    import json

    header = json.loads(frame[codec.PREFIX.size : codec.PREFIX.size + codec.PREFIX.unpack_from(frame)[1]])
    found: list[Any] = header[mark]
    return found


@pytest.mark.parametrize(
    "given", [(SOME, SOME), (WIDE, None), (None, SOME), (SOME, routed([0, 0, 0, 0]))],
    ids=["both", "first", "second", "nothing known"],
)  # fmt: skip
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "with kept tokens"])
def test_a_group_comes_back_from_its_frame(given: tuple[RoutedExperts | None, ...], cut: bool) -> None:
    kept = Kept(np.array([0, 0, 1, 1], np.int32), tokens([7, 8]))
    changes = {"kept": kept, "truncated": True} if cut else {}
    found = codec.decode(codec.encode_bytes(group(*(rollout(one, **changes) for one in given))))
    assert all(equal(e.rollouts[0].experts, one) for e, one in zip(found.episodes, given, strict=True))
    assert all((e.rollouts[0].kept is not None) == cut for e in found.episodes)


def test_single_records_come_back_and_without_experts_are_as_older_ends_know_them() -> None:
    kept = Kept(np.array([1], np.int32), tokens([1]))
    for record in (completion(1, routed([1, 1, 0])), completion(1, WIDE, kept), rollout(SOME)):
        back = codec.decode(codec.encode_bytes(record))
        assert equal(back.experts, record.experts) and (back.kept is None) == (record.kept is None)
    for old, fields in ((completion(1), 6), (completion(1, None, kept), 7), (rollout(), 11)):
        frame = codec.encode_bytes(old)
        assert len(fields_of(frame)) == fields and codec.decode(frame).experts is None
    columns = GroupColumns.of(group(rollout()))
    assert columns is not None and columns.experts is None
    assert len(fields_of(codec.encode_bytes(group(rollout())), "~g")) == 25, "as before experts were recorded"


def test_a_frame_in_which_something_else_stands_for_experts_is_refused() -> None:
    columns = GroupColumns.of(group(rollout(SOME)))
    assert columns is not None
    for wrong in ([3], [SOME, SOME], [Kept(np.zeros(4, np.int32), tokens([]))]):
        with pytest.raises(DataError):
            codec.decode(codec.encode_bytes(replace(columns, experts=wrong)))


# -- the schema


@pytest.mark.parametrize("wrong", ["int32", "known"])
def test_experts_of_other_types_are_refused(wrong: str) -> None:
    check_group(group(rollout(SOME), rollout(WIDE)), 50)
    numbers = SOME.numbers.astype(np.int32) if wrong == "int32" else SOME.numbers
    known = SOME.known.astype(np.int8) if wrong == "known" else SOME.known
    with pytest.raises(DataError, match=r"rollouts\[0\].experts must be RoutedExperts of a bool and a uint8 or uint16"):
        check_group(group(rollout(RoutedExperts(known, numbers))), 50)  # type: ignore[arg-type]


# -- conversations


class RoutingEngine(SayingEngine):
    """Says which experts computed each position, all but the last of them. Each call has other numbers. It ends at each stop id."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.routed: list[RoutedExperts] = []

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        [whole] = await super().sample(prompt, n, sampling, seeds, deadline_s)
        ends = np.flatnonzero(np.isin(whole.tokens, sampling.stop_ids))
        made = first_tokens(whole, int(ends[0]) + 1) if len(ends) else whole
        length = len(prompt) + len(made.tokens)
        self.routed.append(routed([1] * (length - 1) + [0], 7000 * len(self.routed), np.uint16))
        return [replace(made, experts=self.routed[-1])]


async def test_a_rollout_of_two_turns_has_the_experts_of_when_each_token_was_sampled() -> None:
    engine = RoutingEngine()
    conversation = Conversation(EnginePolicy(engine, TOKENIZER, Sampling(8), deadline_s=10), seed=5)
    for text in ("hi", "more"):
        await conversation.reply({"role": "user", "content": text})
    [one] = conversation.episode(Score(1.0)).rollouts
    first, second = engine.routed
    assert one.experts is not None and one.experts.known.tolist() == [True] * (len(one.tokens) - 1) + [False]
    split = len(first.numbers)
    assert one.experts.numbers[:split].tolist() == first.numbers.tolist()
    assert one.experts.numbers[split:].tolist() == second.numbers[split:].tolist()
    assert split < len(second.numbers), "the last token of the first reply is known from the second call"


def test_a_reply_that_is_cut_at_a_stop_text_keeps_the_experts_of_prompt_and_reply() -> None:
    whole = completion(3, routed([1, 1, 1, 1, 0]))  # of a prompt of two tokens
    cut = first_tokens(whole, 2).experts
    assert cut is not None and equal(cut, routed([1, 1, 1, 1]))
    assert first_tokens(completion(3), 2).experts is None


async def test_a_reply_that_goes_on_after_a_possible_stop_has_the_experts_of_all_its_parts() -> None:
    said, prompt = "acab abc", tokens([1, 2])
    engine = RoutingEngine(say=lambda history, seed: said[len(history) - len(prompt) :])
    policy = EnginePolicy(engine, TOKENIZER, Sampling(20, stop=("abc",)), deadline_s=10)
    [made] = await policy.sample(prompt, seed=1)
    assert TOKENIZER.decode(made.tokens) == said and len(engine.routed) == 2, "the engine stopped at the first c, too"
    first, second = engine.routed
    assert made.experts is not None and made.experts.known.tolist() == [True] * 9 + [False]
    split = len(prompt) + 1  # the experts of the c that it stopped at are of the second call
    assert made.experts.numbers[:split].tolist() == first.numbers[:split].tolist()
    assert made.experts.numbers[split:].tolist() == second.numbers[split:].tolist()


# -- batches and files


def test_a_batch_has_the_experts_of_each_token_and_says_which_are_known() -> None:
    batch = to_batch([group(rollout(SOME), rollout()), group(rollout(routed([0, 1, 0, 0], 40)))], 1)
    column = batch.columns[EXPERTS]
    assert column.axis == "token" and column.values.shape == (12, LAYERS, CHOSEN) and column.values.dtype == np.uint8
    assert column.present.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert column.values[:3].tolist() == SOME.numbers.tolist() and column.values[9, 0, 0] == 40
    part = batch.select([2, 0]).columns[EXPERTS]
    assert part.present.tolist() == [0, 1, 0, 0, 1, 1, 1, 0]
    assert part.values[part.present].tolist() == [column.values[9].tolist(), *SOME.numbers.tolist()]
    assert EXPERTS not in to_batch([group(rollout())], 1).columns
    assert codec.decode(codec.encode_bytes(batch)).columns[EXPERTS].values.tolist() == column.values.tolist()


def test_a_batch_of_rollouts_from_other_models_is_refused() -> None:
    other = RoutedExperts(np.array([True, False, False, False]), np.zeros((1, LAYERS + 1, CHOSEN), np.uint8))
    with pytest.raises(DataError, match="routed by models of other layers or experts"):
        to_batch([group(rollout(SOME), rollout(other))], 1)


def columns_of(*rollouts: Rollout) -> dict[str, Any]:
    columns = recording.token_columns(StepRecord(1, {}, (), (SettledGroup(group(*rollouts), "trained"),)))
    assert columns is not None
    return columns


def test_recorded_columns_hold_the_experts() -> None:
    columns = columns_of(rollout(), rollout(SOME))
    assert columns["experts_known"].tolist() == [False] * 4 + [True, True, True, False]
    assert columns["experts"].tolist() == SOME.numbers.tolist()
    assert not {"experts", "experts_known"} & columns_of(rollout()).keys()


@pytest.mark.parametrize("experts", [SOME, WIDE], ids=["uint8", "uint16"])
def test_a_file_of_tokens_gives_each_sequence_its_experts(tmp_path: Path, experts: RoutedExperts) -> None:
    from atropos_records.step_tokens import TokenFile, sequences_of

    columns = columns_of(rollout(experts), rollout(), rollout(experts))
    write_token_file(tmp_path / "step.safetensors", columns)
    file = TokenFile(tmp_path / "step.safetensors")
    for number, found in enumerate(sequences_of(columns)):
        again = file.sequence(number)
        assert found.experts is not None and equal(found.experts, again.experts)
        assert equal(found.experts, experts) == (number != 1) and found.experts.known.any() == (number != 1)
    write_token_file(tmp_path / "plain.safetensors", columns_of(rollout()))
    assert TokenFile(tmp_path / "plain.safetensors").sequence(0).experts is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda columns: {"experts": columns["experts"][:5]}, "experts has 5 entries"),
        (lambda columns: {"experts": None}, "it has no experts"),
        (lambda columns: {"experts_known": None}, "it has no experts_known"),
        (lambda columns: {"experts": columns["experts"].astype(np.int32)}, "experts is I32"),
        (lambda columns: {"experts": columns["experts"].reshape(len(columns["experts"]), -1)}, "not U8 of 3 axes"),
        (lambda columns: {"experts_known": columns["experts_known"].astype(np.uint8)}, "experts_known is U8"),
        (lambda columns: {"experts_known": columns["experts_known"][:3]}, "experts_known has 3 entries|experts has"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_experts_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    from atropos_records.step_tokens import TokenFile

    columns = columns_of(rollout(SOME), rollout(SOME))
    changed = {name: value for name, value in (columns | change(columns)).items() if value is not None}
    write_token_file(tmp_path / "step.safetensors", changed)
    with pytest.raises(DataError, match=says):
        TokenFile(tmp_path / "step.safetensors")
