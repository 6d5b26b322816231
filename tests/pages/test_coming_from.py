"""The tables of docs/coming-from: each name of ours is an option, a command, a metric or a class; and the programs of ours run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import atropos_core
from atropos_config.schema import run_file_schema
from atropos_core import interfaces, types
from atropos_core.config.run_file import NAMED, RunConfig
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.offers import KINDS
from tests.conftest import REPOSITORY
from tests.pages.blocks import BLOCKS
from tests.pages.their_names import PAGES, rows

SCHEMA = run_file_schema(load_plugins().registry)


@cache
def options() -> set[str]:
    """Every dotted path of a run file: `trainer.kl.coefficient`, and `environment.agent.sandbox` where a table has a name."""
    found = set(paths(SCHEMA, "", 0))
    for name, definition in SCHEMA["$defs"].items():
        kind, _, component = name.partition(".")
        if kind in KINDS and component:
            prefix = f"{kind}.{component}" if kind in NAMED else kind
            found |= {f"{prefix}.{path}" for path in paths(definition, "", 0)}
    return found


def paths(schema: dict[str, Any], prefix: str, depth: int) -> Iterator[str]:
    schema = resolved(schema)
    for one in (schema, *(resolved(each) for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ()))):
        for name, inner in one.get("properties", {}).items():
            yield prefix + name
            if depth < 3:
                yield from paths(inner, f"{prefix}{name}.", depth + 1)


def resolved(schema: Any) -> dict[str, Any]:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema, dict) else {}


@cache
def words_of_code() -> str:
    files = [
        *(REPOSITORY / "atropos_core").rglob("*.py"),
        *REPOSITORY.glob("libs/*/atropos_*/**/*.py"),
        *REPOSITORY.glob("plugins/*/atropos_*/**/*.py"),
    ]
    return "\n".join(path.read_text() for path in files) + (REPOSITORY / "docs/run-file.md").read_text()


def is_ours(name: str) -> bool:
    if name.startswith("atropos "):
        return re.search(rf"^    \w*:?.*[\"']{name.split()[1]}[\"']", words_of_code(), re.M) is not None
    if name.startswith("--"):
        return f'"{name}"' in words_of_code()
    if table := re.fullmatch(r"\[(\w+)(?:\.(\w+))?\]", name):
        kind, one = table.groups()
        if kind in NAMED and one:
            return one == "NAME" or any(offer.provider.name == one for offer in load_plugins().registry.offers(kind))
        return f"{kind}.{one}" in options() if one else kind in options()
    if "/" in name:
        return f'"{name}"' in words_of_code() or f"`{name}`" in words_of_code()
    first, *rest = name.split(".")
    if first == "atropos":
        return rest[0] in dir(atropos_core) or hasattr(atropos_core, rest[0])
    if first[0].isupper():
        owner = next((getattr(m, first) for m in (interfaces, types, atropos_core) if hasattr(m, first)), None)
        fields = {*dir(owner), *getattr(owner, "__dataclass_fields__", {}), *getattr(owner, "__annotations__", {})}
        return owner is not None and all(part in fields for part in rest)
    if ".NAME." in name:
        kind, _, option = name.partition(".NAME.")
        model = RunConfig.model_fields[kind].annotation.__args__[1]
        return option in model.model_fields
    return name in options() or any(
        offer.provider.name == name for kind in KINDS for offer in load_plugins().registry.offers(kind)
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_is_one(page):
    named = [name for row in rows(page) for name in row.ours]
    assert len(named) > 10
    assert [name for name in named if not is_ours(name) and f'"{name}"' not in words_of_code()] == []


@pytest.mark.parametrize(
    "name",
    [
        "training.group_sizes",
        "reward.NAME.weigth",
        "[sink2.NAME]",
        "Environment.play",
        "atropos fly",
        "reward/man",
        "--brigde",
    ],
)
def test_a_name_that_there_is_not_is_noticed(name):
    assert not is_ours(name)


@pytest.mark.parametrize("page", PAGES)
def test_our_program_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [text] = [one.text for one in BLOCKS if one.page == f"docs/coming-from/{page}.md" and "import atropos" in one.text]
    assert text.count('model="tiny"') == 1 and text.count("steps=20") == 1
    text = (
        text.replace('model="tiny"', 'model="toy"')
        .replace("steps=20", "steps=2")
        .replace('"trainer.loss": "dapo", ', "")
    )
    made: dict[str, Any] = {"__name__": "add"}
    exec(compile(text, page, "exec"), made)
    assert made["result"].exit_reason == "finished"
    assert len(list(tmp_path.glob("runs/*/metrics.jsonl"))) == 1


@pytest.mark.parametrize("page", PAGES)
def test_their_program_is_python_and_only_imports_what_is_theirs(page):
    programs = [one for one in BLOCKS if one.page == f"docs/coming-from/{page}.md" and one.language == "python"]
    [block] = [one for one in programs if "import atropos" not in one.text]
    compile(block.text, page, "exec")
    assert Path(REPOSITORY, block.page).read_text().count("```python") == 2
