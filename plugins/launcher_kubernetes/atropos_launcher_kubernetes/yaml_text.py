"""YAML for what manifests are made of: mappings, lists, texts, numbers. Every text is quoted as in JSON, which YAML reads alike; one of
several lines is a block."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")  # of a key
BLOCK = re.compile(r"[!-~][\n -~]*[!-~]\n")  # whose indentation a reader finds out, and whose end is one newline
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
WORDS = frozenset(
    {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
)  # that some readers take for something else


def dump(value: Any, indent: int = 0) -> str:
    """Lines that end in a newline, each after `indent` spaces."""
    space = " " * indent
    if isinstance(value, Mapping):
        return "".join(f"{space}{_key(key)}:{_after(one, indent)}" for key, one in value.items())
    return "".join(
        f"{space}- {dump(one, indent + 2).lstrip(' ')}" if _is_nested(one) else f"{space}- {_scalar(one)}\n"
        for one in value
    )


def _after(value: Any, indent: int) -> str:
    if _is_nested(value):
        return "\n" + dump(value, indent + (2 if isinstance(value, Mapping) else 0))
    if isinstance(value, str) and BLOCK.fullmatch(value):
        lines = value.removesuffix("\n").split("\n")
        return " |\n" + "".join(f"{' ' * (indent + 2)}{line}\n" if line else "\n" for line in lines)
    return f" {_scalar(value)}\n"


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and bool(value)


def _scalar(value: Any) -> str:
    """An empty mapping or list as well. Escaped is what YAML does not take as it is, or takes for a line break."""
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _key(key: str) -> str:
    return key if PLAIN.fullmatch(key) and key.lower() not in WORDS else _scalar(key)
