"""docs/hooks.md says what the hook specifications say, and every command on a page has the options that it is given."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess

import pytest
import typer

import atropos_core
from atropos_core import errors, interfaces
from atropos_core.cli import make_app
from atropos_core.plugins import spec as hooks
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.offers import KINDS
from tests.conftest import REPOSITORY
from tests.pages.blocks import PAGES


def test_the_page_of_hooks_has_every_hook_with_its_docstring():
    page = (REPOSITORY / "docs/hooks.md").read_text()
    named = {name: value for name, value in vars(hooks).items() if name.startswith("atropos_")}
    assert set(re.findall(r"^### `(\w+)", page, re.M)) == set(named)
    for name, hook in named.items():
        assert inspect.getdoc(hook) in page, name


def test_the_page_of_hooks_says_of_each_kind_what_its_interface_says():
    """Which class it derives from, which methods it must have, and which of all that it names are coroutines."""
    rows = re.findall(r"^\| (\w+) \| (.+) \| (.+) \| (.*) \| .+ \|$", (REPOSITORY / "docs/hooks.md").read_text(), re.M)
    rows = {kind: rest for kind, *rest in rows if kind in KINDS}
    assert set(rows) == set(KINDS)
    for kind, (base, required, optional) in rows.items():
        interface = getattr(interfaces, kind.capitalize())
        protocol = getattr(interface, "_is_protocol", False)
        assert base == ("nothing" if protocol else f"`{interface.__name__}`"), kind
        if kind != "loss":  # which is made by a decorator
            assert getattr(atropos_core, interface.__name__) is interface
        if kind == "environment":  # of the two that are no abstract methods, it must have one
            required = required.partition(", and one of ")[0]
        named = {name for _, name in methods(required)}
        own = {
            name
            for name, value in vars(interface).items()
            if inspect.isfunction(value) and name in ("__call__", name.strip("_"))
        }
        assert named == (own if protocol else set(interface.__abstractmethods__)), kind
        of_others = {**vars(interfaces.Snapshotted), **vars(interfaces.Stateful), **vars(interfaces.Measured)}
        for said, name in methods(f"{required} {optional}"):
            value = vars(interface).get(name, of_others.get(name))
            if value is None:
                assert (kind, name) in {("reward", "open"), ("reward", "close")}, (kind, name)
            else:
                assert inspect.iscoroutinefunction(value) == bool(said), (kind, name)


def methods(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(async )?(\w+)\(", cell)


def test_the_glossary_has_every_error_with_its_docstring():
    named = dict(
        re.findall(
            r"^\| `(\w+)` \| (.+) \|$", (REPOSITORY / "docs/glossary.md").read_text().split("## Names that")[0], re.M
        )
    )
    classes = {
        name: each for name, each in vars(errors).items() if inspect.isclass(each) and each is not errors.AtroposError
    }
    assert named == {name: (inspect.getdoc(each) or "").partition("\n\n")[0] for name, each in classes.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_between_pages_leads_to_a_file(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_on_a_page_has_the_options_that_it_is_given(page):
    commands = typer.main.get_command(make_app())
    for block in re.findall(r"```(?:\w*)\n(.*?)```", page.read_text(), re.S):
        for line in re.findall(r"^(?:\S*/)?atropos (.*)$", block, re.M):
            words = shlex.split(line, comments=True)
            command, rest = commands, words
            while rest and (found := getattr(command, "commands", {}).get(rest[0])) is not None:
                command, rest = found, rest[1:]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert command is not commands, f"{line!r}: no such command"
            given = {word.partition("=")[0] for word in rest if word.startswith("-")}
            assert given <= known | {"--help"}, f"{line!r}: {given - known}"


def test_every_command_in_the_tables_of_the_readme_has_the_options_that_it_is_given():
    commands = typer.main.get_command(make_app())
    found = re.findall(r"`atropos ([^`]+)`", (REPOSITORY / "README.md").read_text())
    for words in map(shlex.split, found):
        command = commands
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert command is not commands, f"{words}: no such command"
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, words
    assert len(found) >= 8


def test_the_readme_is_short_and_names_plugins_that_there_are():
    page = (REPOSITORY / "README.md").read_text()
    assert len(page.splitlines()) <= 150
    registry = load_plugins().registry
    there = {offer.provider.name for kind in KINDS for offer in registry.offers(kind)}
    lines = re.findall(r"^- \*\*.+?\*\*: (.+)$", page.split("## Plugins")[1].split("\n## ")[0], re.M)
    assert len(lines) == 9
    named = {name for line in lines for name in re.findall(r"(\w+)(?= with|,|$)", re.sub(r" \(.*\)", "", line))}
    assert named - {"losses"} <= there
    assert f"{['nine', 'ten', 'eleven', 'twelve'][len(registry.offers('loss')) - 9]} losses" in page


def test_the_page_for_agents_is_short_and_names_files_and_hooks_that_there_are():
    page = (REPOSITORY / "AGENTS.md").read_text()
    assert 60 <= len(page.splitlines()) <= 90
    spans = re.findall(r"`([^`\n]+)`", page)
    named = [name for name in spans if re.fullmatch(r"[\w.]+/[\w./]*", name) and not re.search("NAME|FOLDER", name)]
    assert len(named) >= 25
    for name in named:
        assert (REPOSITORY / name).exists(), name
    offering = {name for name in vars(hooks) if name.startswith("atropos_")}
    assert {name for name in spans if name.startswith("atropos_") and "/" not in name} - {"atropos_core"} <= offering
    assert {name for name in offering if name.removeprefix("atropos_").removesuffix("s") in KINDS} <= {*spans}


def test_the_map_has_every_folder_of_core_and_every_library():
    page = (REPOSITORY / "docs/where-things-are.md").read_text().split("| tests |")[0]
    named = {name for row in re.findall(r"^\| (`.+?) \|", page, re.M) for name in re.findall(r"`([^`]+)`", row)}
    folders = {path.parent.name for path in REPOSITORY.glob("atropos_core/*/__init__.py")}
    assert named == folders | {f"libs/{path.parent.name}" for path in REPOSITORY.glob("libs/*/pyproject.toml")}


def test_every_file_of_the_map_is_there():
    page = (REPOSITORY / "docs/where-things-are.md").read_text()
    rows = re.findall(r"^\| (?:[^|`]|`[^`]*`)+ \| (.+) \|$", page.split("I want to change")[1], re.M)
    assert len(rows) >= 100
    for row in rows:
        [first, *more] = [name for name in re.findall(r"`([^`]+)`", row) if "/" in name or name.endswith(".py")] or [
            "plugins"
        ]
        near = (REPOSITORY / first).parent
        for name in (first, *more):
            found = [REPOSITORY / name, near / name, near.parent / name, REPOSITORY / first / name]
            assert any(path.exists() for path in found) or list(REPOSITORY.glob(f"[lp]*s/*/*/{name}")), (
                row,
                name,
            )


def test_every_module_says_what_it_does_and_the_commands_of_the_map_find_it():
    for folder in ("atropos_core", "libs", "plugins"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if "tests" not in path.parts and path.name != "__init__.py" and "templates" not in path.parts:
                assert ast.get_docstring(ast.parse(path.read_text())), path
    first_lines, code = re.findall(r"`(git grep .+?)`", (REPOSITORY / "docs/where-things-are.md").read_text())
    for command, file in (
        (first_lines, "libs/trajectory_client/atropos_trajectory_client/http.py"),
        (code, "libs/env_kit/atropos_env_kit/local_datasets.py"),
    ):
        ended = subprocess.run(shlex.split(command), cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert file in ended.stdout
        assert "tests/" not in ended.stdout


def test_every_function_that_the_map_names_is_in_its_file():
    page = (REPOSITORY / "docs/where-things-are.md").read_text()
    seen = 0
    for row in page.split("I want to change")[1].splitlines():
        first = next((name for name in re.findall(r"`([^`]+)`", row) if "/" in name), "")
        pairs = re.findall(r"`([^`]+\.py)` \(((?:`\w+`[, ]*)+)\)", row)
        for file, named in [
            *pairs,
            *((file, name) for name, file in re.findall(r"`(\w+)` (?:in|of) `([^`]+\.py)`", row)),
        ]:
            near = (REPOSITORY / first).parent
            found = [REPOSITORY / file, near / file, near.parent / file, *REPOSITORY.glob(f"[lp]*s/*/*/{file}")]
            text = "".join(path.read_text() for path in found if path.is_file())
            for name in re.findall(r"\w+", named):
                seen += 1
                assert re.search(rf"\b{name}\b", text), (file, name)
    assert seen >= 10
