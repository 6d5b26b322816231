"""What errors, warnings and help texts tell a user to write is taken: a value for an option, a name to import."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from atropos_core.config.component import Component
from atropos_core.config.run_file import NAMED, SINGLE, RunConfig
from tests.conftest import REPOSITORY
from tests.contract.test_advice import PATH, SKYRL, Text, models_in, options, texts

# trainer.kernels = "torch", --set trainer.lora.alpha=8: a path of PATH, and a value that is written out
VALUE = re.compile(rf"{PATH.pattern}\s?=\s?(\"[^\"{{}}]*\"|\[[^\]{{}}]*\]|[\w.-]+(?![\w{{]))")
NAME = re.compile(r"(?<![\w./-])(atropos(?:_\w+)+(?:\.\w+)+)(?![\w/{])")
FILES = (".py", ".md", ".toml", ".json", ".jsonl", ".txt")
ANY = re.compile(r"^(?:N|NAME|VALUE|DIRECTORY|FILE|URL|HOST|\.+)$")  # stands for what the user chooses


def fields_at(path: str) -> list[tuple[type[BaseModel], str]]:
    """Every option that a path may mean: its model, and its name there."""
    first, *rest = path.split(".")
    if first not in (*SINGLE, *NAMED):
        return list(_below((RunConfig,), [first, *rest]))
    if first in NAMED or rest[:1] == ["replica"]:
        rest = rest[2 if rest[:1] == ["replica"] else 1 :]
    own = tuple(models_in(RunConfig.model_fields[first].annotation)) or (Component,)
    return list(_below((*own, *options(first)), rest))


def _below(models: tuple[type[BaseModel], ...], path: list[str]) -> Iterator[tuple[type[BaseModel], str]]:
    if not path:
        return
    for model in models:
        if (field := model.model_fields.get(path[0])) is None:
            continue
        if len(path) == 1:
            yield model, path[0]
        else:
            yield from _below(tuple(models_in(field.annotation)), path[1:])


def is_taken(model: type[BaseModel], name: str, value: Any) -> bool:
    """As the value of this option alone: what options say of each other is not looked at."""
    try:
        model.__pydantic_validator__.validate_assignment(model.model_construct(), name, value)
    except ValidationError as error:
        return all(one["loc"][:1] != (name,) for one in error.errors())
    except AttributeError:  # a check of several options together, which are not there
        return True
    return True


def read(written: str) -> Any:
    """As `--set` and a run file read it."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written


@cache
def values() -> tuple[tuple[str, str, Text], ...]:
    return tuple(
        (path, written.rstrip("."), text)
        for text in texts()
        if not text.where.startswith(SKYRL)
        for path, written in VALUE.findall(text.content)
        if not ANY.match(written) and "{}" not in path
    )


def test_every_value_that_a_text_gives_an_option_is_one_that_it_takes() -> None:
    wrong = [
        f"{path} = {written}: {text}"
        for path, written, text in values()
        if (found := fields_at(path)) and not any(is_taken(model, name, read(written)) for model, name in found)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_name_that_a_text_says_to_import_is_there() -> None:
    named = {(name, text) for text in texts() for name in NAME.findall(text.content) if not name.endswith(FILES)}
    assert len(named) > 10
    wrong = [f"{name}: {text}" for name, text in sorted(named, key=str) if not is_there(name.split("."))]
    assert not wrong, "\n".join(wrong)


def is_there(parts: list[str]) -> bool:
    """By the source, since some of it is for packages that are not installed here; packages of core by their names."""
    package, *rest = parts
    folder = next(
        (one for one in [REPOSITORY / package, *REPOSITORY.glob(f"[lp]*s/*/{package}")] if one.is_dir()), None
    )
    if folder is None:
        return False
    while rest and (folder / rest[0]).is_dir():
        folder, rest = folder / rest[0], rest[1:]
    if not rest:
        return True
    module = folder / f"{rest[0]}.py"
    if module.is_file():
        return len(rest) == 1 or rest[1] in _defined(module.read_text())
    name = ".".join([package, *folder.relative_to(REPOSITORY).parts[1:]]) if package == "atropos_core" else ""
    return rest[0] in _defined((folder / "__init__.py").read_text()) or (
        bool(name) and hasattr(importlib.import_module(name), rest[0])
    )


def _defined(source: str) -> set[str]:
    """Where a module has `__getattr__`, what its tables have by name as well."""
    body = ast.parse(source).body
    found: set[str] = set()
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in body):
        keys = [key for node in body for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys]
        found = {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name for one in node.names}
        else:
            found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found


@pytest.mark.parametrize(
    ("path", "written", "taken"),
    [
        ("trainer.kernels", '"torch"', True),
        ("trainer.kernels", '"tench"', False),
        ("training.group_size", "8", True),
        ("training.group_size", "few", False),
        ("engine.devices", '["cpu"]', True),
        ("engine.devices", "[1.5]", False),
    ],
)
def test_the_search_knows_a_value_from_none(path: str, written: str, taken: bool) -> None:
    found = fields_at(path)
    assert found
    assert any(is_taken(model, name, read(written)) for model, name in found) is taken


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("atropos_core.Options", True),
        ("atropos_core.seeds.derive", True),
        ("atropos_core.seeds.derived", False),
        ("atropos_core.interfaces", True),
        ("atropos_adapter_roll.managers.AgentNativeStepEnvManager", True),
        ("atropos_adapter_roll.managers.AgentNativeManager", False),
        ("atropos_nothing.at.all", False),
    ],
)
def test_the_search_knows_a_name_from_none(name: str, there: bool) -> None:
    assert is_there(name.split(".")) is there


def test_the_search_reads_the_values() -> None:
    assert len(values()) > 20
    assert sum(bool(fields_at(path)) for path, _, _ in values()) > 15
