"""Refuse, or warn of, what a client of the old protocol can send only by mistake: misspelt fields, and masks that fit no token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.errors import DataError
from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS, MASKED
from atropos_trajectory_api.legacy_groups.stored_group import OldGroup
from atropos_trajectory_api.misspelt import refuse_misspelt

MOST_WARNED, MOST_NAMED = 1000, 5
_FIELDS = frozenset(KEYS)
_NESTED = {
    "overrides": frozenset({"set_advantage_to_zero", "temperature", "sft"}),
    "group_overrides": frozenset({"temperature", "sft", "group_size"}),
    "generation_params": frozenset({"temperature"}),
}
_MASK_RULE = "In masks, give each token that is trained its own id, and each other token -100."
_WARNED: set[tuple[str, ...]] = set()


def check_names(data: Mapping[str, Any], environment: str) -> None:
    """Raise DataError for a field of a group, or of its overrides, that is misspelt. Other fields that the protocol does not have are
    ignored, as by atroposlib's server, with one warning for each environment and field."""
    if not data.keys() <= _FIELDS:
        refuse_misspelt(data, _FIELDS)
        warn_of_others([name for name in data if name not in _FIELDS], f"environment {environment!r} sends", KEYS)
    for field, known in _NESTED.items():
        if said := data.get(field):
            each = enumerate(said) if isinstance(said, list) else [(None, said)]
            for number, one in each:
                if isinstance(one, dict) and not one.keys() <= known:
                    refuse_misspelt(one, known, field if number is None else f"{field}[{number}]")


def warn_of_others(names: list[Any], sender: str, known: Collection[str]) -> None:
    """Say once of each sender and field that it is ignored."""
    new = [str(name)[:100] for name in names[:MOST_NAMED] if _first(sender, str(name)[:100])]
    if new:
        console.warn(
            f"{sender} {', '.join(map(repr, new))}, which the protocol does not have: it is ignored. The fields are "
            f"{', '.join(known)}. This is reported once."
        )


def check_masks(group: OldGroup, *, is_piece: bool, passed_on: bool) -> None:
    """Raise DataError for masks from which nothing, or something else than what was meant, would be trained. A piece may be all masked:
    the group that it becomes part of may have other sequences. With `passed_on`, a trainer of the old protocol gets the masks as they
    are and reads them by its own rules; then a value that contradicts its token is only warned of."""
    if (rows := group.rest.get("masks")) is not None:
        masks = np.concatenate([np.asarray(row) for row in rows])
        at = int(((masks != MASKED) & ~group.sampled).argmax())
        place = group.place(at)
        fact = f"masks{place} is {masks[at]}, but tokens{place} is {group.tokens[at]}"
        if not passed_on:
            raise DataError(f"{fact}: a mask is the id of its token or {MASKED}, not a flag.", remedy=_MASK_RULE)
        if _first(group.environment, "masks"):
            console.warn(
                f"environment {group.environment!r} sends masks that contradict its tokens: {fact}. They are given to the "
                f"trainer as they are. {_MASK_RULE} This is reported once."
            )
    elif not is_piece and not group.sampled.any():
        raise DataError(
            f"nothing in this group can be trained: every entry of its masks is {MASKED}.", remedy=_MASK_RULE
        )


def warn_of_nothing_to_train(group: OldGroup) -> None:
    """Say it once of an environment whose pieces make a group of which every token is masked."""
    if not group.sampled.any() and _first(group.environment, "nothing"):
        console.warn(
            f"environment {group.environment!r} sent pieces of a group in which every token is masked, so nothing of it is "
            f"trained. {_MASK_RULE} This is reported once."
        )


def _first(*what: str) -> bool:
    if what in _WARNED or len(_WARNED) >= MOST_WARNED:
        return False
    _WARNED.add(what)
    return True
