"""Every name that plugins take from core and the libraries, with its signature and the module that they take it from, as lines of text.

`python -m tests.pins.names` writes names.txt anew. A module that moves changes the second column alone; whatever else changes is a
change for those who wrote plugins. Plugins are read, not imported, so that none of what they need must be installed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from tests.conftest import REPOSITORY

SHARED = {"atropos_core", *(f"atropos_{path.parent.name}" for path in REPOSITORY.glob("libs/*/pyproject.toml"))}
RECORDED = Path(__file__).with_name("names.txt")


def taken(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file takes from core or a library; of an imported module, what is read of it."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in SHARED:
            for alias in node.names:
                if isinstance(read(str(node.module), alias.name), ModuleType):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield str(node.module), alias.name
        elif isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name: alias.name for alias in node.names if alias.name.split(".")[0] in SHARED
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := modules.get(ast.unparse(node.value))):
            yield module, node.attr


def read(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")


def lines() -> list[str]:
    """One for each name, `name<tab>modules<tab>what it is`, and one for each public method of a class."""
    modules: dict[str, dict[int, tuple[Any, set[str]]]] = {}
    for path in sorted(REPOSITORY.glob("plugins/*/atropos_*/**/*.py")):
        for module, name in taken(path):
            value = read(module, name)
            modules.setdefault(name, {}).setdefault(id(value), (value, set()))[1].add(module)
    rows = []
    for name, values in modules.items():
        for value, where in values.values():
            rows.append((name, ",".join(sorted(where)), described(value)))
            if inspect.isclass(value):
                rows += [(f"{name}.{method}", "", text) for method, text in methods(value)]
    return ["\t".join(row) for row in sorted(rows)]


def described(value: Any) -> str:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"class({bases}) {fields(value)}".rstrip()
    if inspect.isroutine(value):
        return f"{'async ' * inspect.iscoroutinefunction(value)}{signature(value)}"
    return f"a {type(value).__name__}"


def fields(made: type[Any]) -> str:
    if issubclass(made, BaseModel):
        shown = (f"{name}: {one.annotation} = {one.get_default()!r}" for name, one in made.model_fields.items())
    elif dataclasses.is_dataclass(made):
        shown = (f"{one.name}: {one.type}" for one in dataclasses.fields(made))
    else:
        # typing gives a protocol an __init__ of its own, and what derives from one that of object, once there is an instance
        given = object.__init__ if getattr(made, "_is_protocol", False) else vars(made).get("__init__", object.__init__)
        return "" if given is object.__init__ else signature(given)
    return plain(f"{{{', '.join(shown)}}} {'' if issubclass(made, BaseModel) else signature(made.__init__)}".strip())


def methods(made: type[Any]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(made).items()):
        if name.startswith("_") and name not in ("__call__", "__enter__", "__aenter__"):
            continue
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(inner):
            abstract = "abstract " if getattr(inner, "__isabstractmethod__", False) else ""
            yield name, f"{abstract}{described(inner)}"
        elif isinstance(value, property):
            yield name, f"property {signature(value.fget)}"


def signature(function: Any) -> str:
    return plain(str(inspect.signature(function)))


def plain(text: str) -> str:
    """Without addresses, modules and line ends, which are no part of what a caller relies on."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"\s+", " ", re.sub(r"\batropos_core(\.\w+)*\.(?=\w)", "", text))


if __name__ == "__main__":
    RECORDED.write_text("\n".join(lines()) + "\n")
