"""The experts of an agent's tokens, over the calls of an episode and its branches."""

from __future__ import annotations

import numpy as np

from atropos_agent_api.tokens.account import account_of
from atropos_agent_api.tokens.token_tree import Reply, Turn
from atropos_core.types import Completion, RoutedExperts, tokens


def call(parent: Reply | None, added: list[int], sampled: list[int], number: int) -> Turn:
    """A call with one reply. Every position that it computed has expert `number`."""
    turn = Turn(number, "chat", parent, "start", (), 1, bytes([number]), tokens(added), (), True, False, {}, {})
    length = (0 if parent is None else len(parent.history)) + len(added) + len(sampled)
    experts = RoutedExperts(np.arange(length) < length - 1, np.full((length - 1, 2, 1), number, np.uint8))
    zeros = np.zeros(len(sampled), np.float32)
    made = Completion(tokens(sampled), zeros, zeros.astype(np.int32), "stop", 1.0, experts=experts)
    turn.replies.append(Reply(turn, {"role": "assistant", "content": ""}, bytes([number]), made, tokens([])))
    if parent is not None:
        parent.children.append(turn)
    return turn


def test_a_rollout_has_the_experts_of_the_call_that_computed_each_position_first() -> None:
    first = call(None, [1, 2], [3, 4], 1)
    second = call(first.replies[0], [5], [6, 7, 8], 2)
    other = call(first.replies[0], [9], [10], 3)
    rollouts = account_of([first, second, other]).rollouts
    assert [one.tokens.tolist() for one in rollouts] == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10]]
    found = [(one.experts.known.tolist(), one.experts.numbers[:, 0, 0].tolist()) for one in rollouts if one.experts]
    assert found == [
        ([True] * 7 + [False], [1, 1, 1, 2, 2, 2, 2]),
        ([True] * 5 + [False], [1, 1, 1, 3, 3]),
    ]


def test_trained_calls_are_in_the_order_of_the_calls_with_the_place_of_each() -> None:
    first = call(None, [1, 2], [3, 4], 1)
    other = call(None, [9], [10], 2)
    second = call(first.replies[0], [5], [6, 7, 8], 3)
    silent = call(other.replies[0], [11], [], 4)
    account = account_of([first, other, second, silent])
    assert [one.tokens.tolist() for one in account.rollouts] == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
    assert account.turns == ((0, 4), (1, 2), (0, 8), (1, 0))


def test_turns_of_histories_that_were_sampled_in_turns_have_the_order_of_their_calls() -> None:
    lead = call(None, [1, 2], [3, 4], 1)
    other = call(None, [9], [10], 2)
    more = call(lead.replies[0], [5], [6, 7, 8], 3)
    last = call(other.replies[0], [11], [12], 4)
    begun = [lead, other, more, last]
    for number, turn in enumerate(begun):
        turn.answered_before = number
    account = account_of(begun)
    assert [one.turn_order.tolist() for one in account.rollouts if one.turn_order is not None] == [[0, 2], [1, 3]]
    assert account.turns == ((0, 4), (1, 2), (0, 8), (1, 4))


def test_histories_one_after_the_other_need_no_order_and_calls_that_began_together_have_one_of_their_own() -> None:
    lead = call(None, [1, 2], [3, 4], 1)
    more = call(lead.replies[0], [5], [6, 7, 8], 2)
    other = call(None, [9], [10], 3)
    for number, turn in enumerate((lead, more, other)):
        turn.answered_before = number
    assert [one.turn_order for one in account_of([lead, more, other]).rollouts] == [None, None]
    for turn in (lead, other):
        turn.answered_before = 0  # both began before either was answered
    more.answered_before = 2
    made = [account_of(begun).rollouts for begun in ([lead, other, more], [other, lead, more])]
    orders = [[one.turn_order.tolist() for one in rollouts if one.turn_order is not None] for rollouts in made]
    assert orders == [[[0, 2], [1]]] * 2
