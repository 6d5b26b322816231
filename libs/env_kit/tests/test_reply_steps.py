"""Steps of replies end with the token that completes a separator, and with their turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.types import Rollout, Tokens, tokens
from atropos_env_kit.reply_steps import step_ends

PIECES = ["a", "\n", "\n\n", "b\n", "\nc", "\n\nd\n\ne", "é".encode()[:1], "é".encode()[1:], ""]


def decode(ids: Tokens) -> str:
    said = [PIECES[one] for one in ids.tolist()]
    return b"".join(one if isinstance(one, bytes) else one.encode() for one in said).decode(errors="replace")


def rollout(turns: Sequence[Sequence[int]]) -> Rollout:
    """Each turn after one token that was not sampled."""
    ids = [one for turn in turns for one in (0, *turn)]
    mask = np.array([flag for turn in turns for flag in (False, *[True] * len(turn))])
    return Rollout(tokens(ids), mask, mask, None, np.zeros(len(ids), np.int32), 1.0)


@pytest.mark.parametrize(
    ("turns", "ends"),
    [
        ([[0, 2, 0]], [3, 4]),
        ([[0, 1, 1, 0]], [4, 5]),  # a separator of two tokens
        ([[0, 3, 4, 0]], [4, 5]),  # its halves are in tokens with other text
        ([[0, 2]], [3]),  # the separator ends the turn
        ([[5, 0]], [2, 3]),  # two separators in one token
        ([[6, 7, 2, 0]], [4, 5]),  # a character of two tokens before it
        ([[0, 2, 0], [0, 0]], [3, 4, 7]),
        ([[0]], [2]),
    ],
)
def test_a_step_ends_with_the_token_that_completes_its_separator(turns, ends):
    assert step_ends(rollout(turns), decode) == ends


@given(st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12), min_size=1, max_size=3))
def test_ends_rise_are_sampled_and_include_the_end_of_each_turn(turns):
    made = rollout(turns)
    ends = step_ends(made, decode)
    assert ends == sorted(set(ends))
    assert made.sampled[np.array(ends) - 1].all()
    assert {*np.cumsum([1 + len(turn) for turn in turns]).tolist()} <= {*ends}
    for turn, last in zip(turns, np.cumsum([1 + len(turn) for turn in turns]).tolist(), strict=True):
        first = last - len(turn)
        text = decode(made.tokens[first:last])
        own = [end for end in ends if first < end <= last]
        assert len(own) <= 1 + text.count("\n\n")
        for end in own[:-1]:
            before, after = decode(made.tokens[first : end - 1]), decode(made.tokens[first:end])
            assert after.count("\n\n") > before.count("\n\n")
