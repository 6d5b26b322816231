"""What errors, warnings and help texts tell a user to type exists: commands, their flags, options of the run file, extras, routes."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import typer
from pydantic import BaseModel

from atropos_core.cli import make_app
from atropos_core.config.component import Component
from atropos_core.config.run_file import NAMED, SINGLE, RunConfig
from atropos_core.plugins.manager import load_plugins
from atropos_simulation.figures import description
from atropos_trajectory_api.legacy.openapi import old_paths
from atropos_trajectory_api.native.openapi import native_paths
from tests.conftest import REPOSITORY

# Flags of other programs, and who takes them; vLLM's are those of the engine's own files.
OTHERS_FLAGS = {
    "--ipc": "docker", "--shm-size": "docker", "--force-reinstall": "pip", "--index-url": "pip", "--no-deps": "pip",
    "--head": "ray", "--address": "ray", "--parsable": "sbatch", "--constraint": "sbatch",
    "--config_path": "ROLL", "--config_name": "ROLL", "--relative-to": "realpath",
}  # fmt: skip
# Files whose texts are printed by several commands, or under one that their name does not show: a flag that stands alone must be
# one of every command here.
PRINTED_BY = {
    "atropos_core/launch/start.py": ("run", "train"),
    "atropos_core/storage/run_directory.py": ("run", "train"),
    "plugins/trajectory_api/atropos_trajectory_api/roles/processing.py": ("process",),
    "libs/doctor/atropos_doctor/machine_checks.py": ("run",),
    "libs/trajectory_client/atropos_trajectory_client/source.py": ("run", "train", "resume"),
    "atropos_core/launch/memory_remedies.py": ("run", "train", "resume", "eval", "process"),
    "plugins/trajectory_api/atropos_trajectory_api/journal/log.py": ("serve",),
    "plugins/trajectory_api/atropos_trajectory_api/journal/store.py": ("serve",),
    "libs/http_server/atropos_http_server/connection_limits.py": ("serve", "train", "engine"),
    "plugins/trajectory_api/atropos_trajectory_api/http/access.py": ("serve", "train", "engine"),
    "plugins/trajectory_api/atropos_trajectory_api/engine_http/server.py": ("train", "engine"),
    "plugins/trajectory_api/atropos_trajectory_api/server/serving.py": ("serve",),
    "plugins/trajectory_api/atropos_trajectory_api/legacy/intake.py": ("serve",),
}
VLLM = "plugins/engine_vllm/"
SIMULATION = "plugins/simulation/"  # its `--set` takes figures, not options of a run
SKYRL = "plugins/adapter_skyrl/"  # `trainer.` there is SkyRL's own section


@dataclass(frozen=True)
class Text:
    """A sentence of the program, with {} for what is filled in."""

    where: str
    content: str

    def __str__(self) -> str:
        return f"{self.where}: {self.content}"


def _literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _texts_of(node: ast.AST, where: str) -> Iterator[Text]:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    docstring = first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else None
    for child in ast.iter_child_nodes(node):
        if child is docstring:
            continue
        if (content := _literal(child)) is None:
            yield from _texts_of(child, where)
            continue
        if " " in content:
            yield Text(f"{where}:{child.lineno}", content)  # type: ignore[attr-defined]
        if isinstance(child, ast.JoinedStr):
            for part in child.values:
                yield from _texts_of(part, where)


@cache
def texts() -> tuple[Text, ...]:
    found = []
    for root in ("atropos_core", "libs", "plugins"):
        for file in sorted((REPOSITORY / root).rglob("*.py")):
            where = str(file.relative_to(REPOSITORY))
            if "/tests/" not in where and "/examples/" not in where:
                found += _texts_of(ast.parse(file.read_text()), where)
    return tuple(found)


@cache
def commands() -> dict[str, frozenset[str]]:
    """ "serve" -> its flags."""

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, frozenset[str]]]:
        yield (
            name,
            frozenset(flag for each in command.params for flag in (*each.opts, *each.secondary_opts)) | {"--help"},
        )
        for each, below in getattr(command, "commands", {}).items():
            yield from walk(below, f"{name} {each}".strip())

    return dict(walk(typer.main.get_command(make_app()), ""))


CALL = r"`atropos ([^`]*)`|(?:: |^ *)atropos ([a-z][^`;,]*)"


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z_-]*[a-z]\b(?!\.\w)", text))


def without_calls(text: str) -> str:
    """What is left beside commands that are quoted, or that stand after a colon or alone."""
    return re.sub(CALL, "", text)


def calls_in(text: str) -> Iterator[tuple[str, set[str]]]:
    """Commands that a text quotes, with the flags that it gives them."""
    for found in re.finditer(CALL, text):
        words = (quoted := found[1] or found[2]).split()
        names = [" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in commands()]
        yield (names[0] if names else words[0]), flags_in(quoted)


@cache
def options(kind: str) -> tuple[type[BaseModel], ...]:
    """The models of what is installed of this kind."""
    return tuple(one.provider.options for one in load_plugins().registry.offers() if one.kind == kind)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def exists(path: list[str], models: tuple[type[BaseModel], ...]) -> bool:
    """Whether one of the models has the option at this path; {} stands for any name."""
    if not path or not models:
        return not path
    first, *rest = path
    for model in models:
        for name, field in model.model_fields.items():
            if first in (name, "{}"):
                below = tuple(models_in(field.annotation))
                if (
                    not rest
                    or not below
                    or exists(rest, below)
                    or (_is_mapping(field.annotation) and exists(rest[1:], below))
                ):
                    return True
    return False


def _is_mapping(annotation: Any) -> bool:
    return "dict" in str(annotation) or "Mapping" in str(annotation)


def is_option(path: str) -> bool:
    first, *rest = re.sub(r"NAME$", "{}", path).split(".")
    if first not in (*SINGLE, *NAMED):
        return exists([first, *rest], (RunConfig,))
    own = tuple(models_in(RunConfig.model_fields[first].annotation)) or (Component,)
    if first == "engine" and rest[:1] == ["replica"]:
        rest = rest[2:]
    if first in NAMED:
        rest = rest[1:]
    return exists(rest, (*own, *options(first)))


SECTIONS = "|".join(name for name, field in RunConfig.model_fields.items() if list(models_in(field.annotation)))
PATH = re.compile(
    rf"(?<![\w./\-\[{{}}])((?:{SECTIONS})(?:\.(?:[a-zA-Z_]+|{{}}))+)(?![\w(/])(?!\.(?:json|toml|yaml|py)\b)"
)
SECTION = re.compile(rf"(?<![\w-])\[((?:{SECTIONS})(?:\.(?:\w+|{{}}))*)\]")


def test_every_command_that_a_text_names_exists_and_takes_the_flags_beside_it() -> None:
    wrong = []
    for text in texts():
        for command, flags in calls_in(text.content):
            if command in ("...", "{}", "--help", "--version"):
                continue
            if command not in commands():
                wrong.append(f"no command {command!r}: {text}")
            elif command != "adapter" and (unknown := flags - commands()[command]):
                wrong.append(f"atropos {command} takes no {unknown}: {text}")
    assert not wrong, "\n".join(wrong)


def test_every_flag_that_a_text_names_is_one_of_some_command() -> None:
    known = set().union(*commands().values(), OTHERS_FLAGS)
    wrong = [
        f"{unknown}: {text}"
        for text in texts()
        if not text.where.startswith(VLLM) and (unknown := flags_in(text.content) - known)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "file",
    [
        *PRINTED_BY,
        "atropos_core/cli/run.py",
        "atropos_core/cli/resume.py",
        *(f"libs/testing/atropos_testing/{name}_command.py" for name in ("new", "check")),
    ],
)
def test_a_flag_that_stands_alone_is_one_of_every_command_that_says_it(file: str) -> None:
    printed_by = PRINTED_BY.get(file) or (Path(file).stem.removesuffix("_command"),)
    known = set.intersection(*(set(commands()[name]) for name in printed_by)) | OTHERS_FLAGS.keys()
    assert (REPOSITORY / file).is_file()
    wrong = [
        f"{unknown}: {text}"
        for text in texts()
        if text.where.startswith(f"{file}:") and (unknown := flags_in(without_calls(text.content)) - known)
    ]
    assert not wrong, f"not of all of {printed_by}: " + "\n".join(wrong)


def test_every_option_of_a_run_file_that_a_text_names_exists() -> None:
    wrong = []
    for text in texts():
        for path in (*PATH.findall(text.content), *SECTION.findall(text.content)):
            if text.where.startswith(SKYRL) and path.startswith("trainer."):
                continue
            if text.where.startswith(SIMULATION) and description(path):
                continue
            if not is_option(path):
                wrong.append(f"{path}: {text}")
    assert not wrong, "\n".join(wrong)


def test_every_extra_that_a_text_says_to_install_exists() -> None:
    named = set()
    for text in texts():
        for distribution, extra in re.findall(r"(atropos-[\w-]+)\[(\w+)\]", text.content):
            storey = "plugins" if distribution.startswith("atropos-plugin-") else "libs"
            folder = REPOSITORY / storey / re.sub("^atropos-(plugin-)?", "", distribution).replace("-", "_")
            if distribution == "atropos-core":
                folder = REPOSITORY
            extras = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extra in extras, str(text)
            named.add(extra)
    assert {"export", "plot"} <= named


def test_no_text_sends_a_user_to_a_page_that_is_not_in_the_wheels() -> None:
    page = re.compile(r"\b(?:docs|plugins|libs)/[\w./-]+\.md\b")
    assert page.search("See docs/my-rewards-are-all-0.md.")
    named = [str(text) for text in texts() if page.search(text.content) and "https://" not in text.content]
    assert not named, "\n".join(named)


def test_every_route_that_a_text_says_to_call_exists() -> None:
    routes = {(method.upper(), route) for route, of in {**old_paths()[0], **native_paths()}.items() for method in of}
    named = {
        (method, route, text)
        for text in texts()
        if text.where.startswith("plugins/trajectory_api/")
        for method, route in re.findall(r"\b(GET|POST|PUT|DELETE) (/[\w/-]+)", text.content)
    }
    assert len(named) >= 5
    for method, route, text in named:
        assert (method, route) in routes, str(text)


def test_every_variable_of_the_environment_that_a_text_names_is_read() -> None:
    read: set[str] = set()
    named: set[tuple[str, Text]] = set()
    for text in texts():
        named |= {(name, text) for name in re.findall(r"\bATROPOS_[A-Z_]+", text.content)}
    for root in ("atropos_core", "libs", "plugins"):
        for file in (REPOSITORY / root).rglob("*.py"):
            if "/tests/" not in str(file):
                read |= {
                    node.value
                    for node in ast.walk(ast.parse(file.read_text()))
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
    assert named
    for name, text in named:
        assert name in read, str(text)


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("training.group_size", True),
        ("training.groupsize", False),
        ("trainer.lora.alpha", True),
        ("trainer.lora.alfa", False),
        ("transform.{}.use", True),
        ("engine.replica.NAME", True),
        ("engine.kv_cache_gb", True),
        ("teacher.{}.top_k", True),
        ("api.wait_s", True),
        ("api.waits", False),
    ],
)
def test_the_search_knows_an_option_from_none(path: str, there: bool) -> None:
    assert is_option(path) is there


def test_the_search_reads_the_texts() -> None:
    content = [text.content for text in texts()]
    assert len(content) > 1000
    assert sum(bool(PATH.findall(each)) for each in content) > 60
    assert sum(bool(flags_in(each)) for each in content) > 60
    assert sum(bool(list(calls_in(each))) for each in content) > 40
    assert Path(REPOSITORY / "docs").is_dir()
