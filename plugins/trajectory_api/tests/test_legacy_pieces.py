from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_trajectory_api.legacy.pieces import Piece, Pieces, joined, summing_to
from atropos_trajectory_api.legacy.retries import Retries, digest
from atropos_trajectory_api.legacy_groups.incoming_groups import read
from atropos_trajectory_api.legacy_groups.stored_group import OldGroup


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 12))
def test_a_sum_is_found_wherever_there_is_one(sizes: list[int], target: int) -> None:
    chosen = summing_to(sizes, target)
    exists = any(sum(some) == target for n in range(len(sizes) + 1) for some in combinations(sizes, n))
    assert bool(chosen) == exists
    assert sum(sizes[i] for i in chosen) == (target if exists else 0)
    assert chosen == sorted(set(chosen))


def sent(sequences: int, **more: Any) -> OldGroup:
    data = {"tokens": [[1]] * sequences, "masks": [[1]] * sequences, "scores": [0.5] * sequences, **more}
    return read(data, "maths")


def piece(key: str, sequences: int, **more: Any) -> Piece:
    group = sent(sequences, **more)
    return Piece.of(key, group, group.frame())


def keys(pieces: Pieces, environment: int = 3) -> list[str]:
    return [one.key for one in pieces._of.get(environment, {}).values()]


def test_pieces_that_say_different_things_are_not_mixed(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path)
    pieces.add(3, piece("a", 1, inference_logprobs=[[-1.0]]))
    pieces.add(3, piece("b", 3))
    assert pieces.whole(3, 4) == []
    pieces.add(3, piece("c", 3, inference_logprobs=[[-1.0]] * 3))
    whole = pieces.whole(3, 4)
    taken = pieces.begin(3, whole)
    assert [one.key for one in taken] == ["a", "c"]
    assert len(joined([one.group() for one in taken])["inference_logprobs"]) == 4
    pieces.end(3, whole, stored=True)
    again = Pieces(tmp_path)
    assert keys(again) == ["b"] and again.sequences(3) == 3
    again.clear()
    assert list(tmp_path.iterdir()) == [] and again.size_bytes == 0


def test_images_are_joined_where_there_is_one_for_each_sequence() -> None:
    assert joined([sent(1, images=["x"]), sent(2, images=["y", "z"])])["images"] == ["x", "y", "z"]
    assert joined([sent(1, images="x"), sent(2, images="y")])["images"] == "x"


def test_masks_that_are_neither_a_token_nor_hidden_stay_beside_their_tokens() -> None:
    assert joined([sent(1, masks=[[5]]), sent(2)])["masks"] == [[5], [1], [1]]


def test_what_is_on_its_way_into_the_hub_makes_no_other_group(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path)
    for key, size in (("a", 2), ("b", 1), ("c", 2)):
        pieces.add(3, piece(key, size))
    going = pieces.whole(3, 4)
    assert [one.key for one in pieces.begin(3, going)] == ["a", "c"]
    pieces.add(3, piece("d", 1))
    assert pieces.whole(3, 4) == []
    pieces.end(3, going, stored=False)
    assert pieces.whole(3, 4) == [0, 1, 3]


@pytest.mark.parametrize("removed", [0, 1, 2, 3])
@pytest.mark.parametrize("stored", [True, False])
def test_a_server_that_was_killed_while_pieces_went_into_the_hub_neither_loses_nor_repeats_them(
    stored: bool, removed: int, tmp_path: Path
) -> None:
    before = Pieces(tmp_path)
    for key, size in (("a", 2), ("b", 1), ("c", 1), ("d", 1)):
        before.add(3, piece(key, size))
    going = before.whole(3, 4)
    before.begin(3, going)
    for number in going[:removed] if stored else ():
        (tmp_path / f"3-{number}.piece").unlink()
    after = Pieces(tmp_path, knows=lambda key: stored and key == "c")
    assert keys(after) == (["d"] if stored else ["a", "b", "c", "d"])
    assert after.found >= {"d"} and list(tmp_path.glob("*.whole")) == []
    after.add(3, piece("e", 1))
    assert keys(after)[-1] == "e", "its number is a new one"


@pytest.mark.parametrize("name", ["3-0.piece", "3-7.piece", "0.json", "3-1.whole"])
@pytest.mark.parametrize("content", [b"", b"{", b'{"key": "a", "crc": 1}\n[0]', b"[]\n", b"null\nx", b"\xff\xfe\n"])
def test_a_file_that_is_no_piece_is_named_and_passed_over(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Pieces(tmp_path).add(3, piece("a", 1))
    (tmp_path / "3-0.piece").rename(tmp_path / "3-2.piece")
    (tmp_path / name).write_bytes(content)
    (tmp_path / "3-9.partial").write_bytes(b"half")
    assert keys(Pieces(tmp_path)) == ["a"]
    told = "".join(capsys.readouterr().err.split())
    assert "".join(name.split()) in told and "itisskipped" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({name, "3-2.piece"})


def test_a_piece_costs_what_it_holds_however_many_there_are(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path)
    sizes = []
    for number in range(50):
        pieces.add(3, piece(str(number), 1, tokens=[[1] * 4096], masks=[[1] * 4096]))
        sizes.append(pieces.size_bytes)
    assert len(set(np.diff(sizes))) <= 2 and sizes[-1] < 50 * 4096 * 5
    assert {path.stat().st_size < 4096 * 5 for path in tmp_path.iterdir()} == {True}, "each is written once"
    assert not Pieces(None, most_bytes=10_000).fits(piece("x", 1, tokens=[[1] * 4096], masks=[[1] * 4096]))


def test_only_what_a_killed_server_stored_last_counts_as_sent_again() -> None:
    now, stored = [1000.0], set()
    before = Retries(stored.__contains__, clock=lambda: now[0])
    for at, body in ((1000.0, b"early"), (1031.0, b"late"), (1033.0, b"list")):
        now[0] = at
        stored |= {before.new_key(digest(body), item) for item in range(2 if body == b"list" else 1)}
    now[0] = 1060.0
    after = Retries(stored.__contains__, killed_at=1034.0, clock=lambda: now[0])
    assert after.take(digest(b"early"), 1) == 0
    assert after.take(digest(b"late"), 1) == 1
    assert after.take(digest(b"late"), 1) == 0, "the next one is meant"
    assert after.take(digest(b"list"), 3) == 2, "the third item is still to be stored"
    clean = Retries(stored.__contains__, clock=lambda: now[0])
    assert clean.take(digest(b"late"), 1) == 0
    now[0] = 1400.0
    late = Retries(stored.__contains__, killed_at=1034.0, clock=lambda: now[0])
    now[0] = 1800.0
    assert late.take(digest(b"list"), 3) == 0, "no client retries for so long"


def test_a_file_whose_time_is_just_before_the_slot_of_its_key_counts_as_stored_last() -> None:
    stored = {Retries(lambda _: False, clock=lambda: 1035.0).new_key(digest(b"body"))}
    after = Retries(stored.__contains__, killed_at=1034.998, clock=lambda: 1040.0)
    assert after.take(digest(b"body"), 1) == 1


def test_a_body_that_was_refused_before_it_was_stored_is_found_under_the_first_key_of_its_slot() -> None:
    before = Retries(lambda _: False, clock=lambda: 1031.0)
    first, second = before.new_key(digest(b"body")), before.new_key(digest(b"body"))
    before.give_back(first)
    assert before.new_key(digest(b"body")) == first != second
    assert before.new_key(digest(b"body")) not in (first, second)


def test_equal_bodies_of_one_moment_have_keys_of_their_own() -> None:
    retries = Retries(lambda _: False, clock=lambda: 7.0)
    assert len({retries.new_key(digest(b"x")) for _ in range(5)}) == 5


def test_what_waited_for_room_until_the_server_was_killed_counts_as_sent_again() -> None:
    now, stored = [1000.0], set()
    before = Retries(stored.__contains__, hold_s=240.0, clock=lambda: now[0])
    stored |= {before.new_key(digest(b"held"), held=True), before.new_key(digest(b"at once"))}
    now[0] = 1250.0
    after = Retries(stored.__contains__, killed_at=1239.0, hold_s=240.0, clock=lambda: now[0])
    assert after.take(digest(b"held"), 1) == 1
    assert after.take(digest(b"at once"), 1) == 0, "that was answered long before the kill"


def test_equal_groups_have_keys_of_their_own() -> None:
    keys = Retries(lambda key: False, clock=lambda: 1000.0)
    assert (
        len({keys.new_key("d", item, held=held) for item in (0, 1) for held in (False, True) for _ in range(3)}) == 12
    )
