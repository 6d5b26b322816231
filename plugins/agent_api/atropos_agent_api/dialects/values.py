"""Read the values of a request: each function returns a value, or raises CallRefused with the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from atropos_agent_api.calls import CallRefused, read_arguments
from atropos_agent_api.dialects.fields import Wish, shown, unsupported
from atropos_core.rollouts.replies import DEEPEST, NAME_CHARACTERS, is_shallow

OF_PARTS = {
    "type",
    "text",
    "refusal",
    "annotations",
    "logprobs",
    "citations",
    "cache_control",
    "prompt_cache_breakpoint",
}
MOST_TOKENS = 2**31 - 1
MOST_CHOICES = 128
MOST_STOPS = 16


def wrong(path: str, expected: str) -> CallRefused:
    return CallRefused(f"{path} must be {expected}.", field=path[:200], code="invalid_type")


def an_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(path, "an object")
    return value


def a_list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(path, "a list")
    return value


def a_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise wrong(path, "text")
    return value


def a_name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS:
        raise wrong(path, f"text of 1 to {NAME_CHARACTERS} characters")
    return value


def a_flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false")
    return value


def an_integer(given: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong(name, f"an integer from {least} to {most}")
    return value


def number(least: float, most: float) -> Wish:
    """A reader for a number that the client wishes."""

    def read(value: Any, name: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(name, "a number")
        if not least <= value <= most or not math.isfinite(value):
            raise wrong(name, f"a number from {least:g} to {most:g}")
        return value

    return read


def number_but(neutral: float, least: float, most: float) -> Wish:
    """A reader for a number whose `neutral` value asks for nothing."""
    read = number(least, most)

    def wish(value: Any, name: str) -> float | str | None:
        found = read(value, name)
        return None if found == neutral else found

    return wish


def word(value: Any, name: str) -> str | None:
    """A word that the client wishes."""
    return None if value is None else a_name(value, name)


def stops(value: Any, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else a_list(value, name)
    if len(given) > MOST_STOPS or not all(isinstance(one, str) and one for one in given):
        raise wrong(name, f"text, or a list of at most {MOST_STOPS} texts, none of them empty")
    return tuple(given)


def text_of(content: Any, path: str, kinds: Sequence[str], between: str = "") -> str:
    """The text of a message's content: a text, or a list of parts of these kinds, which have "text"."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise wrong(path, "text or a list of parts")
    texts = []
    for at, part in enumerate(content):
        here = f"{path}[{at}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = an_object(part, here).get("type")
        if kind not in kinds:
            raise CallRefused(
                f"{here} has the type {str(kind)[:40]!r}, but this API accepts {' and '.join(kinds)}: "
                "the policy reads text. Send it as text.",
                field=here,
                code="unsupported_content",
            )
        if more := part.keys() - OF_PARTS:
            raise unsupported(f"{here}.{min(more)}", f"{shown(f'{here}.{min(more)}')} is not supported")
        texts.append(a_text(part.get("text" if "text" in part else "refusal"), f"{here}.text"))
    return between.join(texts)


def arguments_of(text: Any, path: str) -> Any:
    """The arguments of a call: an object if they are a JSON object, else the text."""
    if isinstance(text, dict):
        return a_schema(text, path)
    if text is None or text == "":
        return {}
    value = read_arguments(a_text(text, path))
    return value if isinstance(value, dict) else text


def a_schema(value: Any, path: str) -> dict[str, Any]:
    """A JSON schema, which a chat template writes out."""
    if value is None:
        return {"type": "object", "properties": {}}
    if not is_shallow(an_object(value, path)):
        raise CallRefused(f"{path} is nested more than {DEEPEST} levels deep. Send a flatter value.", field=path)
    return dict(value)


def arguments_text(arguments: Any) -> str:
    """The arguments of a call as JSON text, for the client."""
    if isinstance(arguments, str):
        return writable(arguments)
    text = json.dumps(arguments, ensure_ascii=False)
    return text if is_writable(text) else json.dumps(arguments)


def writable(text: str) -> str:
    """The text with a mark for every half of a surrogate pair, which cannot be encoded."""
    return text if is_writable(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_writable(value: Any) -> bool:
    """True if every text in it can be encoded, and every number written as JSON."""
    try:
        orjson.dumps(value)
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return False
    return True
