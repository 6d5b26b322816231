"""Overrides and temperatures of the sequences in a group of the old protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from atropos_core.errors import DataError
from atropos_core.group_schema import brief, check_temperature
from atropos_trajectory_api.legacy_groups.wire_lists import types_of

SETTINGS = frozenset(
    {"overrides", "group_overrides", "generation_params"}
)  # without any of these, everything is as it was sampled


class SharedSettings:
    """The settings of each sequence: its overrides take precedence over the generation parameters, and these over the group's.
    Raises TypeError for a value of the wrong type, DataError for what coercion cannot fix."""

    def __init__(self, data: Mapping[str, Any], sequences: int) -> None:
        overrides = data.get("overrides") or []
        general, params = data.get("group_overrides") or {}, data.get("generation_params") or {}
        if not (overrides or general or params):
            self.zeroed, self.sft, self.temperatures = [False] * sequences, [False] * sequences, [1.0] * sequences
            return
        if (
            types_of(overrides) - {dict}
            or type(overrides) is not list
            or type(general) is not dict
            or type(params) is not dict
        ):
            raise TypeError
        if len(overrides) > sequences:
            raise DataError(f"overrides: there are {len(overrides)}, for {sequences} sequences")
        each = [*overrides, *[{}] * (sequences - len(overrides))]
        self.zeroed = [bool(one.get("set_advantage_to_zero")) for one in each]
        self.sft = [bool(one.get("sft", general.get("sft"))) for one in each]
        default = _temperature("group_overrides", general, 1.0)
        default = _temperature("generation_params", params, default)
        self.temperatures = [_temperature(f"overrides[{n}]", one, default) for n, one in enumerate(each)]


def _temperature(where: str, said: Mapping[str, Any], default: float) -> float:
    if said.get("temperature") is None:
        return default
    given = said["temperature"]
    try:
        value = float(given)  # also text, as in the trainers of atroposlib
    except (TypeError, ValueError, OverflowError):
        value = math.inf
    try:
        check_temperature("", value)
    except DataError as error:
        what = Exception.__str__(error).partition(": ")[2]
        raise DataError(f"{where}['temperature'] is {brief(given)}: {what}") from None
    return value
