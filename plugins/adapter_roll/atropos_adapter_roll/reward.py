"""Compute the reward: named parts from the environment's score and the texts of the replies, whose sum the trainer gets."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from atropos_adapter_roll.config import LengthBonus, RewardOptions
from atropos_core.rollouts.replies import message_of, searched
from atropos_core.turn_rewards import by_turn
from atropos_core.types import Episode

_TAG = re.compile(r"<(\w+)>")
_COMMAND = re.compile(r"(\\\w+)\{\}")


def warn_of_wrong_replies_ahead(options: RewardOptions) -> None:
    """Log one line if the options let a bonus lift a wrong reply over a right one."""
    if not options.right_first:
        bonus = sum(each.weight for each in (options.format, options.length) if each is not None)
        logging.getLogger(__name__).warning(
            "reward.right_first is false: bonuses of up to %g count for wrong replies as for right ones, next to %g times the "
            "environment's score; a wrong answer may earn more than a right one.", bonus, options.environment,
        )  # fmt: skip


def parts_of(options: RewardOptions, episode: Episode, replies: Sequence[str]) -> dict[str, float]:
    """`environment`, `format`, `length`, in this order: their sum, added up in it, is the reward.

    A bonus is its weight times a share from 0 to 1. For a wrong reply (`correct` is False) with `right_first` it is
    weight * (share - 1), at most 0. So if the environment scores a right reply above a wrong one, the sums keep
    that order for all weights and texts. `replies` are the raw texts, reasoning and tool calls included.
    """
    wrong = options.right_first and episode.correct is False
    parts = {"environment": options.environment * episode.score}
    if options.format is not None:
        last = replies[-1] if replies else ""
        share = sum(has_marker(last, marker) for marker in options.format.markers) / len(options.format.markers)
        parts["format"] = options.format.weight * (share - wrong)
    if options.length is not None:
        share = brevity(options.length, sum(len(reply) for reply in replies))
        parts["length"] = options.length.weight * (share - wrong)
    return parts


def turns_of(options: RewardOptions, episode: Episode) -> list[float]:
    """Return the part of the reward that each reply earned, or an empty list if the environment places none. Bonuses, and the rest of the
    environment's score, are earned at the end."""
    if all(rollout.turns is None for rollout in episode.rollouts):
        return []
    return [options.environment * value for rollout in episode.rollouts for value in by_turn(rollout).tolist()]


def has_marker(text: str, marker: str) -> bool:
    """Return whether a reply has the mark, as `FormatBonus.markers` describes one: in its reasoning only if the mark is a thinking tag."""
    text = searched(message_of(text), marker)
    if tag := _TAG.fullmatch(marker):
        pattern = rf"<{tag[1]}>\s*(?!</{tag[1]}>)\S.*?</{tag[1]}>"
    elif command := _COMMAND.fullmatch(marker):
        pattern = re.escape(command[1]) + r"\{\s*[^\s}]"
    elif len(marker) > 2 and marker[0] == marker[-1] == "/":
        pattern = marker[1:-1]
    else:
        return marker in text
    return re.search(pattern, text, re.DOTALL) is not None


def brevity(options: LengthBonus, characters: int) -> float:
    """1 up to `free`, 0 from `limit` on, linear in between; 0 below `at_least`."""
    if characters < options.at_least:
        return 0.0
    return min(1.0, max(0.0, (options.limit - characters) / (options.limit - options.free)))
