"""Tools and tool_choice in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.dialects.fields import Fields, shown
from atropos_agent_api.dialects.values import a_name, a_schema, a_text, an_object, wrong

FUNCTION = Fields(read=dict.fromkeys(("type", "name", "description", "parameters", "strict"), ""))


def a_function(value: Any, path: str) -> dict[str, Any]:
    """A tool in chat form."""
    given = an_object(value, path)
    if given.get("type") != "function":
        raise CallRefused(
            f"{path} has the type {shown(str(given.get('type')))}, but this API accepts functions. Describe the tool as a function.",
            field=f"{path}.type",
            code="unsupported_tool",
        )
    return function_tool(an_object(given.get("function"), f"{path}.function"), f"{path}.function")


def function_tool(given: Mapping[str, Any], path: str, schema: str = "parameters") -> dict[str, Any]:
    """The description of a function, as chat templates show it."""
    FUNCTION.check(given, path)
    function: dict[str, Any] = {"name": a_name(given.get("name"), f"{path}.name")}
    if given.get("description") is not None:
        function["description"] = a_text(given["description"], f"{path}.description")
    function["parameters"] = a_schema(given.get(schema), f"{path}.{schema}")
    return {"type": "function", "function": function}


def strictness(functions: Iterable[Any]) -> tuple[str, ...]:
    """Entries for Call.left_out: the arguments that the policy writes are not constrained."""
    return ("tools: strict",) if any(isinstance(one, dict) and one.get("strict") for one in functions) else ()


def a_choice(value: Any, has_tools: bool) -> str:
    """As Call.tool_choice."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise wrong("tool_choice", "auto, none, required or an object that names a function")
        if value == "required" and not has_tools:
            raise CallRefused(
                "tool_choice is required, but the request has no tools. Send tools, or leave it out.",
                field="tool_choice",
            )
        return value
    given = an_object(value, "tool_choice")
    if given.get("type") != "function":
        raise CallRefused(
            f"tool_choice of the type {shown(str(given.get('type')))} is not supported. Use auto, none, required or a function.",
            field="tool_choice",
            code="unsupported_parameter",
        )
    named = given if "name" in given else an_object(given.get("function"), "tool_choice.function")
    return f"tool:{a_name(named.get('name'), 'tool_choice.function.name')}"
