"""Which tools the policy was shown for each task."""

from __future__ import annotations

import json

from atropos_core.rollouts import tool_sets
from atropos_core.rollouts.tool_sets import ToolSets


def test_tools_are_remembered_in_their_own_order_each_set_once():
    found = ToolSets()
    tool = {"type": "function", "function": {"name": "find", "description": "b", "parameters": {}}}
    for task in ("a", "b"):
        found.note((1, task), [dict(tool)])
    found.note((1, "c"), [])
    found.note((1, "d"), [{"not": object()}])
    assert json.dumps(found.of((1, "a"))) == json.dumps([tool])
    assert found.of((1, "a")) is found.of((1, "b"))
    assert found.of((1, "c")) == found.of((1, "d")) == found.of((2, "a")) == ()


def test_what_is_remembered_is_bounded():
    found = ToolSets()
    found.note((1, "large"), [{"text": "x" * tool_sets.MOST_BYTES}])
    for number in range(tool_sets.MOST_SETS + 1):
        found.note((1, f"set-{number}"), [{"name": number}])
    assert found.of((1, "large")) == found.of((1, f"set-{tool_sets.MOST_SETS}")) == ()
    for number in range(tool_sets.MOST_TASKS):
        found.note((2, str(number)), [{"name": 0}])
    assert found.of((1, "set-0")) == () and found.of((2, "0")) == ({"name": 0},)
