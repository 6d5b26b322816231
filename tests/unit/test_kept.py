"""What top_p, top_k and min_p kept, on its way from an engine to a batch: records, frames, schema, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core import codec
from atropos_core.builtin import recording
from atropos_core.codec.columns import GroupColumns
from atropos_core.errors import DataError
from atropos_core.group_schema import check_group, check_kept_is_known, check_sampling
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.rollouts.stop_texts import first_tokens
from atropos_core.storage.token_file import write_token_file
from atropos_core.training.batch import to_batch
from atropos_core.types import (
    KEPT,
    MOST_KEPT,
    MOST_TIES,
    Completion,
    Draw,
    Episode,
    Kept,
    Rollout,
    Sampling,
    ScoredGroup,
    Task,
    tokens,
)


def kept(*sets: list[int]) -> Kept:
    return Kept(np.array([*map(len, sets)], np.int32), tokens([token for one in sets for token in one]))


def rollout(cut: Kept | None = None, *, truncated: bool | None = None) -> Rollout:
    mask = np.array([False, False, True, True])
    logprobs = np.array([0, 0, -0.5, 0], np.float32)
    return Rollout(
        tokens([5, 6, 7, 8]), mask, mask, logprobs, np.zeros(4, np.int32), 1.0,
        cut is not None if truncated is None else truncated, kept=cut,
    )  # fmt: skip


def group(*rollouts: Rollout) -> ScoredGroup:
    episodes = tuple(Episode((one,), 1.0) for one in rollouts)
    return ScoredGroup(
        Draw(1, "e", "train", 0, 3), Task("t", ()), episodes, np.ones(len(rollouts), np.float32),
        advantages=np.ones(len(rollouts), np.float32),
    )  # fmt: skip


CUT = kept([], [], [3, 7, 9], [8])


def test_parts_are_joined_at_their_positions_and_cut_again() -> None:
    made = Kept.joined(6, [(1, kept([4, 5], [6])), (4, None), (5, kept([2]))])
    assert made is not None
    assert made.sizes.tolist() == [0, 2, 1, 0, 0, 1] and made.token_ids.tolist() == [4, 5, 6, 2]
    assert made.part(3).sizes.tolist() == [0, 2, 1] and made.part(3).token_ids.tolist() == [4, 5, 6]
    assert Kept.joined(6, [(0, None)]) is None


@pytest.mark.parametrize("sizes", [[1, 2], [-1, 4], [1]])
def test_sizes_that_do_not_add_up_are_refused(sizes: list[int]) -> None:
    with pytest.raises(DataError, match="add up to the 2 token ids" if sizes != [-1, 4] else "add up"):
        Kept(np.array(sizes, np.int32), tokens([1, 2]))


def test_a_completion_that_is_cut_at_a_stop_keeps_what_belongs_to_its_tokens() -> None:
    zeros = np.zeros(3, np.float32)
    made = Completion(tokens([1, 2, 3]), zeros, np.zeros(3, np.int32), "length", 1.0, True, kept([1, 9], [2], [3, 4]))
    cut = first_tokens(made, 2).kept
    assert cut is not None and cut.sizes.tolist() == [2, 1] and cut.token_ids.tolist() == [1, 9, 2]


def equal(one: Kept | None, other: Kept | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.sizes.tolist() == other.sizes.tolist() and one.token_ids.tolist() == other.token_ids.tolist()


@pytest.mark.parametrize("cuts", [(CUT, CUT), (CUT, None), (None, CUT)], ids=["both", "first", "second"])
def test_a_group_comes_back_from_its_frame_with_what_was_kept(cuts: tuple[Kept | None, ...]) -> None:
    sent = group(*map(rollout, cuts))
    found = codec.decode(codec.encode_bytes(sent))
    assert [equal(e.rollouts[0].kept, cut) for e, cut in zip(found.episodes, cuts, strict=True)] == [True, True]
    assert [e.rollouts[0].truncated for e in found.episodes] == [cut is not None for cut in cuts]


def test_single_records_come_back_too_and_without_kept_tokens_are_as_older_ends_know_them() -> None:
    zeros = np.zeros(1, np.float32)
    made = Completion(tokens([1]), zeros, np.zeros(1, np.int32), "stop", 1.0, True, kept([1, 2]))
    assert equal(codec.decode(codec.encode_bytes(made)).kept, made.kept)
    assert equal(codec.decode(codec.encode_bytes(rollout(CUT))).kept, CUT)
    for record, fields in ((replace(made, kept=None), 6), (rollout(), 11), (Sampling(8), 4)):
        assert f'"~r":"{type(record).__name__}"'.encode() in (frame := codec.encode_bytes(record))
        assert codec.decode(frame) is not None and len(fields_of(frame)) == fields
    assert codec.decode(codec.encode_bytes(Sampling(8, min_p=0.1))) == Sampling(8, min_p=0.1)
    assert codec.decode(codec.encode_bytes(Sampling(8, stop=("x",)))) == Sampling(8, stop=("x",))
    columns = GroupColumns.of(group(rollout()))
    assert columns is not None and columns.kept is None
    assert len(fields_of(codec.encode_bytes(group(rollout())), "~g")) == 25, "as before kept tokens were recorded"


def fields_of(frame: bytes, mark: str = "~f") -> list[Any]:
    import json

    header = json.loads(frame[codec.PREFIX.size : codec.PREFIX.size + codec.PREFIX.unpack_from(frame)[1]])
    found: list[Any] = header[mark]
    return found


def test_a_run_says_min_p_only_if_it_is_set() -> None:
    assert "min_p" not in Sampling().of_run()
    assert Sampling.from_run(Sampling(min_p=0.2).of_run()) == Sampling(min_p=0.2)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [(Sampling(), 0), (Sampling(top_k=20), 20), (Sampling(top_p=0.9), MOST_KEPT), (Sampling(min_p=0.1), MOST_KEPT),
     (Sampling(temperature=0.0, top_k=20), 0)],
)  # fmt: skip
def test_what_is_kept_is_bounded_if_anything_is_cut(sampling: Sampling, most: int) -> None:
    assert sampling.most_kept == most and sampling.truncated == bool(most)


@pytest.mark.parametrize("wrong", [{"top_k": MOST_KEPT + 1}, {"min_p": 1.5}, {"min_p": -0.1}, {"min_p": True}], ids=str)
def test_impossible_cuts_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"sampling.{next(iter(wrong))} is "):
        check_sampling(Sampling(**wrong))


MANY = list(range(MOST_KEPT + MOST_TIES + 1))


@pytest.mark.parametrize(
    ("cut", "changes", "says"),
    [
        (CUT, {"truncated": False}, "names tokens, but truncated is False"),
        (kept([], [], [3, 9], [8]), {}, r"tokens\[2\] is 7, which is not among the tokens that were kept"),
        (kept([], [5], [7], [8]), {}, r"kept.sizes\[1\] is not 0, and that token was not sampled"),
        (kept([], [], [7, 90], [8]), {}, "token id 90 is outside the policy's vocabulary of 50"),
        (kept([], [], [7, -1], [8]), {}, "token id -1 is outside"),
        (kept([], [], [7], MANY), {}, rf"kept.sizes\[3\] is {len(MANY)}: at most {MOST_KEPT} tokens are kept"),
        (Kept(np.zeros(4, np.int32), np.zeros(0, np.float32)), {}, "must be a Kept of two columns of int32"),
    ],
    ids=["flag", "own token", "not sampled", "too high", "negative", "too many", "types"],
)  # fmt: skip
def test_kept_tokens_that_cannot_be_are_refused(cut: Kept, changes: dict[str, Any], says: str) -> None:
    check_group(group(rollout(CUT)), 50)
    with pytest.raises(DataError, match=says):
        check_group(group(replace(rollout(cut), **changes)), 0 if cut.sizes.max(initial=0) > 100 else 50)


def test_a_client_that_does_not_say_what_it_kept_is_refused_with_what_to_send() -> None:
    check_kept_is_known(group(rollout(CUT), rollout()))
    for unknown in (rollout(truncated=True), replace(rollout(kept([], [], [], [])), truncated=True)):
        with pytest.raises(DataError, match=r"episodes\[1\].rollouts\[0\] was sampled with top_p") as error:
            check_kept_is_known(group(rollout(CUT), unknown))
        assert "Kept(sizes, token_ids)" in str(error.value) and "top_p = 1" in str(error.value)
    untrained = replace(rollout(truncated=True), trained=np.zeros(4, np.bool_))
    check_kept_is_known(group(untrained))


def test_a_batch_has_what_was_kept_at_each_token_and_says_what_is_unknown() -> None:
    batch = to_batch([group(rollout(CUT), rollout(), rollout(truncated=True))], 1)
    assert batch.kept_sizes.tolist() == [0, 0, 3, 1] + [0] * 8
    assert batch.ragged[KEPT].values.tolist() == [3, 7, 9, 8]
    assert batch.unknown_cut.tolist() == [False, False, True]
    assert batch.select([2, 0]).kept_sizes.tolist() == [0] * 4 + [0, 0, 3, 1]
    plain = to_batch([group(rollout())], 1)
    assert KEPT not in plain.ragged and not plain.kept_sizes.any() and not plain.unknown_cut.any()


def test_memory_of_kept_tokens_counts() -> None:
    assert rollout(CUT).size_bytes - rollout().size_bytes == 4 * 4 + 4 * 4


def test_recorded_columns_hold_what_was_kept() -> None:
    settled = (SettledGroup(group(rollout(), rollout(CUT)), "trained"),)
    columns = recording.token_columns(StepRecord(1, {}, (), settled))
    assert columns is not None
    assert columns["kept_sizes"].tolist() == [0, 0, 0, 0, 0, 0, 3, 1]
    assert columns["kept_ids"].tolist() == [3, 7, 9, 8]
    plain = recording.token_columns(StepRecord(1, {}, (), (SettledGroup(group(rollout()), "trained"),)))
    assert plain is not None and "kept_sizes" not in plain


def test_a_file_of_tokens_gives_each_sequence_what_was_kept_in_it(tmp_path: Path) -> None:
    from atropos_records.step_tokens import TokenFile, sequences_of

    columns = recording.token_columns(
        StepRecord(1, {}, (), (SettledGroup(group(rollout(), rollout(CUT), rollout(CUT)), "trained"),))
    )
    assert columns is not None
    write_token_file(tmp_path / "step.safetensors", columns)
    file = TokenFile(tmp_path / "step.safetensors")
    for number, found in enumerate(sequences_of(columns)):
        again = file.sequence(number)
        assert found.kept is not None and equal(found.kept, again.kept)
        assert equal(found.kept, CUT) == (number > 0)
    write_token_file(tmp_path / "short.safetensors", columns | {"kept_ids": columns["kept_ids"][:3]})
    with pytest.raises(DataError, match="kept_ids has 3 entries"):
        TokenFile(tmp_path / "short.safetensors")
    write_token_file(tmp_path / "half.safetensors", {k: v for k, v in columns.items() if k != "kept_ids"})
    with pytest.raises(DataError, match="it has no kept_ids"):
        TokenFile(tmp_path / "half.safetensors")
