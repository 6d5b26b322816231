"""Packing: every column of every rollout, at its place, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.errors import DataError
from atropos_core.training.batch import to_batch
from atropos_core.types import (
    SEQUENCE_COLUMNS,
    TOKEN_COLUMNS,
    UNKNOWN_VERSION,
    Column,
    Ragged,
    Rollout,
    ScoredGroup,
    TopK,
)
from tests.unit.parts import episode, group, rollout


def of(number: int, *members: tuple[float, list[Rollout]]) -> ScoredGroup:
    """A group whose members have these advantages and rollouts."""
    made = replace(
        group(number, [0.0] * len(members)),
        episodes=tuple(episode(0.0, "", *rollouts) for _, rollouts in members),
    )
    return made.with_advantages(np.array([advantage for advantage, _ in members], np.float32))


def test_two_groups_lie_one_after_another_with_every_column_in_its_place():
    cut = np.array([False, False, True, False], bool)  # sampled twice, trained once: an overlong mask
    first = of(0, (0.5, [rollout(1, 2, version=3)]), (-2.0, [rollout(2, 2, version=4, trained=cut, temperature=0.7)]))
    second = of(9, (1.25, [rollout(1, 1, logprobs=None, truncated=True)]))
    batch = to_batch([first, second], version=5)
    assert batch.version == 5
    assert batch.tokens.tolist() == [10, 11, 12, 10, 11, 12, 13, 10, 11]
    assert batch.offsets.tolist() == [0, 3, 7, 9]
    assert batch.lengths.tolist() == [3, 4, 2]
    assert batch.sequences == 3
    assert batch.sampled.tolist() == [False, True, True, False, False, True, True, False, True]
    assert batch.trained.tolist() == [False, True, True, False, False, True, False, False, True]
    assert batch.logprobs.tolist() == [0, -0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0]
    assert batch.has_logprobs.tolist() == [True, True, False]
    assert batch.policy_version.tolist() == [0, 3, 3, 0, 0, 4, 4, 0, 0]
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0, 0, -2, 0, 0, 1.25]
    assert batch.temperature.tolist() == [1.0, np.float32(0.7), 1.0]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.group.tolist() == [0, 0, 1], "numbered within the batch, not by draw"
    for name, kind in (("tokens", np.int32), ("offsets", np.int64), ("logprobs", np.float32), ("policy_version", np.int32),
                       ("advantages", np.float32), ("temperature", np.float32), ("group", np.int32)):  # fmt: skip
        assert getattr(batch, name).dtype == kind, name


def test_rollouts_of_one_episode_share_its_advantage_and_its_group():
    batch = to_batch([of(0, (2.0, [rollout(1, 1), rollout(0, 2)]), (3.0, [rollout(1, 1)]))], version=1)
    assert batch.advantages.tolist() == [0, 2, 2, 2, 0, 3]
    assert batch.group.tolist() == [0, 0, 0]


def test_a_batch_knows_whose_rollouts_are_of_one_episode():
    several = of(0, (0.5, [rollout(1, 2), rollout(2, 2), rollout(1, 3)]), (1.0, [rollout(1, 1)]))
    batch = to_batch([several, of(1, (0.0, [rollout(1, 1)]))], 1)
    assert batch.episode.tolist() == [0, 0, 0, 1, 2]
    assert batch.select([4, 1, 3]).episode.tolist() == [2, 0, 1]
    alone = to_batch([of(0, (0.5, [rollout(1, 2)]), (1.0, [rollout(1, 1)]))], 1)
    assert alone.episode.tolist() == [0, 1] and not alone.columns, "nothing travels that says nothing"


def test_a_rollouts_own_advantages_go_before_its_groups_and_count_only_where_trained():
    own = np.array([9.0, 0.25, -0.25], np.float32)
    cut = np.array([False, True, False])
    members = (
        (5.0, [rollout(1, 2, advantages=own)]),
        (5.0, [rollout(1, 2, advantages=own, trained=cut)]),
        (5.0, [rollout(1, 2)]),
    )
    batch = to_batch([of(0, *members)], version=1)
    assert batch.advantages.tolist() == [0, 0.25, -0.25, 0, 0.25, 0, 0, 5, 5]


def test_a_group_whose_rollouts_all_bring_advantages_needs_no_transform():
    own = np.ones(3, np.float32)
    bare = replace(group(0, [1.0]), episodes=(episode(1.0, "", rollout(1, 2, advantages=own)),))
    assert to_batch([bare], version=1).advantages.tolist() == [0, 1, 1]


def test_a_group_without_advantages_is_named_with_the_remedy():
    with pytest.raises(DataError, match=r"task 'train-4' has no advantages") as caught:
        to_batch([group(4)], version=1)
    assert "group_advantage" in str(caught.value)


def test_what_only_some_rollouts_bring_is_a_column_and_says_where_it_is():
    reference = np.array([0, -1, -2], np.float32)
    with_reference, bare = rollout(1, 2, ref_logprobs=reference), rollout(1, 1)
    batch = to_batch(
        [of(0, (1.0, [bare]), (1.0, [with_reference])), of(1, (1.0, [rollout(0, 1, sft=True)]))], version=1
    )
    column = batch.columns["ref_logprobs"]
    assert column.values.tolist() == [0, 0, 0, -1, -2, 0]
    assert column.present.tolist() == [False, False, True, True, True, False]
    assert batch.columns["sft"].values.tolist() == [False, False, True]
    assert batch.ragged == {}
    assert to_batch([of(0, (1.0, [bare]))], version=1).columns == {}


def test_a_teachers_tokens_lie_ragged_beside_the_tokens_that_they_speak_of():
    batch = to_batch([of(0, (1.0, [rollout(1, 1)]), (1.0, [rollout(1, 2, teacher=teacher(0, 2, 1))]))], version=1)
    ids, logprobs = batch.ragged["teacher_token_ids"], batch.ragged["teacher_logprobs"]
    assert ids.offsets.tolist() == logprobs.offsets.tolist() == [0, 0, 0, 0, 2, 3]
    assert ids.values.tolist() == [0, 1, 2]
    assert ids.values.dtype == np.int32
    assert logprobs.values.tolist() == [-1, -2, -3]
    assert batch.select([1]).ragged["teacher_token_ids"].offsets.tolist() == [0, 0, 2, 3]
    assert batch.select([0]).ragged["teacher_token_ids"].values.tolist() == []


def teacher(*counts: int) -> TopK:
    """As many tokens at each position as `counts` says: 0, 1, 2, ... with logprobs -1, -2, ..."""
    entries = np.arange(sum(counts))
    return TopK(np.cumsum([0, *counts]), entries.astype(np.int32), (-1 - entries).astype(np.float32))


@pytest.mark.parametrize(
    ("offsets", "ids", "logprobs"),
    [([1, 2], [4, 5], [-1, -1]), ([0, 1], [4, 5], [-1, -1]), ([0, 2, 1, 2], [4, 5], [-1, -1]), ([], [], []),
     ([0, 1], [4], [-1, -1]), ([0, 1], [-4], [-1]), ([0, 1], [4], [np.nan]), ([[0, 1]], [4], [-1])],
    ids=str,
)  # fmt: skip
def test_a_teacher_that_is_not_in_order_is_refused(offsets, ids, logprobs):
    with pytest.raises(DataError, match="a teacher"):
        TopK(np.array(offsets, np.int64), np.array(ids, np.int32), np.array(logprobs, np.float32))


def test_a_rollouts_further_columns_are_checked_and_counted():
    bare = rollout(1, 2)
    more = rollout(1, 2, ref_logprobs=np.zeros(3, np.float32), teacher=teacher(0, 1, 2))
    assert more.size_bytes == bare.size_bytes + 3 * 4 + 4 * 8 + 3 * (4 + 4)
    with pytest.raises(DataError, match="a teacher has 2 positions, but there are 3 tokens"):
        rollout(1, 2, teacher=teacher(0, 1))
    with pytest.raises(DataError, match="'ref_logprobs' has shape"):
        rollout(1, 2, ref_logprobs=np.zeros(2, np.float32))
    with pytest.raises(DataError, match="'ref_logprobs' that is not finite"):
        rollout(1, 2, ref_logprobs=np.array([0, 1, np.inf], np.float32))


def test_a_group_counts_what_it_keeps_for_old_clients_and_knows_its_oldest_version():
    made = group(0, version=3)
    assert replace(made, wire={"images": "x" * 1000}).size_bytes == made.size_bytes + len('{"images": ""}') + 1000
    assert made.oldest_version == 3
    mixed = rollout(1, 2, policy_version=np.array([0, 5, UNKNOWN_VERSION], np.int32))
    assert of(0, (0.0, [mixed])).oldest_version == 5, "what was not sampled or is not known does not count"
    unknown = rollout(1, 1, policy_version=np.full(2, UNKNOWN_VERSION, np.int32))
    assert of(0, (0.0, [unknown])).oldest_version is None


@pytest.mark.parametrize("groups", [[], [of(0)]])
def test_no_rollouts_make_no_batch(groups):
    with pytest.raises(DataError, match="at least one rollout"):
        to_batch(groups, version=1)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_selecting_sequences_gives_what_packing_them_alone_would_have(shapes, random):
    groups = [
        of(number, *((float(number + member), [rollout(*shape)]) for member, shape in enumerate(members)))
        for number, members in enumerate(shapes)
    ]
    batch = to_batch(groups, version=2)
    extra = {
        "per_token": Column("token", np.arange(len(batch.tokens)), np.ones(len(batch.tokens), bool)),
        "per_sequence": Column("sequence", np.arange(batch.sequences), np.ones(batch.sequences, bool)),
        "per_group": Column("group", np.arange(len(groups)), np.ones(len(groups), bool)),
    }
    counts = [random.randint(0, 3) for _ in batch.tokens]
    entries = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    ragged = {"many": Ragged(np.cumsum([0, *counts]), np.arange(sum(counts)))}
    chosen = random.sample(range(batch.sequences), random.randint(0, batch.sequences))
    picked = replace(batch, columns=extra, ragged=ragged).select(chosen)
    at = [position for row in chosen for position in range(batch.offsets[row], batch.offsets[row + 1])]
    for name in TOKEN_COLUMNS:
        assert getattr(picked, name).tolist() == getattr(batch, name)[at].tolist(), name
    for name in SEQUENCE_COLUMNS:
        assert getattr(picked, name).tolist() == getattr(batch, name)[chosen].tolist(), name
    assert picked.lengths.tolist() == [batch.lengths[row] for row in chosen]
    assert picked.columns["per_token"].values.tolist() == at
    assert picked.columns["per_sequence"].values.tolist() == chosen
    assert picked.columns["per_group"].values.tolist() == list(range(len(groups)))
    many = picked.ragged["many"]
    assert many.offsets.tolist() == [0, *np.cumsum([counts[position] for position in at]).tolist()]
    assert many.values.tolist() == [value for position in at for value in entries[position]]
