from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atropos_trajectory_api.old_pieces import Piece, Pieces, joined, summing_to
from atropos_trajectory_api.old_retries import Retries, digest


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 12))
def test_a_sum_is_found_wherever_there_is_one(sizes: list[int], target: int) -> None:
    chosen = summing_to(sizes, target)
    exists = any(sum(some) == target for n in range(len(sizes) + 1) for some in combinations(sizes, n))
    assert bool(chosen) == exists
    assert sum(sizes[i] for i in chosen) == (target if exists else 0)
    assert chosen == sorted(set(chosen))


def piece(key: str, sequences: int, **more: Any) -> Piece:
    return Piece(key, {"tokens": [[1]] * sequences, "masks": [[1]] * sequences, "scores": [0.5] * sequences, **more})


def test_pieces_that_say_different_things_are_not_mixed(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path)
    pieces.add(3, piece("a", 1, inference_logprobs=[[-1.0]]))
    pieces.add(3, piece("b", 3))
    assert pieces.whole(3, 4) == []
    pieces.add(3, piece("c", 3, inference_logprobs=[[-1.0]] * 3))
    whole = pieces.whole(3, 4)
    assert [one.key for one in whole] == ["a", "c"]
    assert len(joined(whole)["inference_logprobs"]) == 4
    pieces.remove(3, whole)
    again = Pieces(tmp_path)
    assert again.keys() == ["b"] and again.sequences(3) == 3
    again.clear()
    assert list(tmp_path.iterdir()) == []


def test_images_are_joined_where_there_is_one_for_each_sequence() -> None:
    assert joined([piece("a", 1, images=["x"]), piece("b", 2, images=["y", "z"])])["images"] == ["x", "y", "z"]
    assert joined([piece("a", 1, images="x"), piece("b", 2, images="y")])["images"] == "x"


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
    assert late.take(digest(b"list"), 3) == 0, "nobody tries for so long"


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
