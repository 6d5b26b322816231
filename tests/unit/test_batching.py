"""Packing: every column of every rollout, at its place, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.batching import pack
from atropos_core.errors import DataError
from atropos_core.types import SEQUENCE_COLUMNS, TOKEN_COLUMNS, Column, Rollout, ScoredGroup
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
    batch = pack([first, second], version=5)
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
    batch = pack([of(0, (2.0, [rollout(1, 1), rollout(0, 2)]), (3.0, [rollout(1, 1)]))], version=1)
    assert batch.advantages.tolist() == [0, 2, 2, 2, 0, 3]
    assert batch.group.tolist() == [0, 0, 0]


def test_a_rollouts_own_advantages_go_before_its_groups_and_count_only_where_trained():
    own = np.array([9.0, 0.25, -0.25], np.float32)
    cut = np.array([False, True, False])
    members = (
        (5.0, [rollout(1, 2, advantages=own)]),
        (5.0, [rollout(1, 2, advantages=own, trained=cut)]),
        (5.0, [rollout(1, 2)]),
    )
    batch = pack([of(0, *members)], version=1)
    assert batch.advantages.tolist() == [0, 0.25, -0.25, 0, 0.25, 0, 0, 5, 5]


def test_a_group_whose_rollouts_all_bring_advantages_needs_no_transform():
    own = np.ones(3, np.float32)
    bare = replace(group(0, [1.0]), episodes=(episode(1.0, "", rollout(1, 2, advantages=own)),))
    assert pack([bare], version=1).advantages.tolist() == [0, 1, 1]


def test_a_group_without_advantages_is_named_with_the_remedy():
    with pytest.raises(DataError, match=r"task 'train-4' has no advantages") as caught:
        pack([group(4)], version=1)
    assert "group_advantage" in str(caught.value)


@pytest.mark.parametrize("groups", [[], [of(0)]])
def test_no_rollouts_make_no_batch(groups):
    with pytest.raises(DataError, match="at least one rollout"):
        pack(groups, version=1)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_selecting_sequences_gives_what_packing_them_alone_would_have(shapes, random):
    groups = [
        of(number, *((float(number + member), [rollout(*shape)]) for member, shape in enumerate(members)))
        for number, members in enumerate(shapes)
    ]
    batch = pack(groups, version=2)
    extra = {
        "per_token": Column("token", np.arange(len(batch.tokens)), np.ones(len(batch.tokens), bool)),
        "per_sequence": Column("sequence", np.arange(batch.sequences), np.ones(batch.sequences, bool)),
        "per_group": Column("group", np.arange(len(groups)), np.ones(len(groups), bool)),
    }
    chosen = random.sample(range(batch.sequences), random.randint(0, batch.sequences))
    picked = replace(batch, columns=extra).select(chosen)
    at = [position for row in chosen for position in range(batch.offsets[row], batch.offsets[row + 1])]
    for name in TOKEN_COLUMNS:
        assert getattr(picked, name).tolist() == getattr(batch, name)[at].tolist(), name
    for name in SEQUENCE_COLUMNS:
        assert getattr(picked, name).tolist() == getattr(batch, name)[chosen].tolist(), name
    assert picked.lengths.tolist() == [batch.lengths[row] for row in chosen]
    assert picked.columns["per_token"].values.tolist() == at
    assert picked.columns["per_sequence"].values.tolist() == chosen
    assert picked.columns["per_group"].values.tolist() == list(range(len(groups)))
