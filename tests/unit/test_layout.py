"""Rules that the design states about names and imports, read off the files."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CORE = REPOSITORY / "atropos_core"
PLUGINS = sorted(path.parent for path in (REPOSITORY / "plugins").glob("*/pyproject.toml"))
LIBRARIES = sorted(path.parent for path in (REPOSITORY / "libs").glob("*/pyproject.toml"))
FRAMEWORKS = {"torch", "transformers", "peft", "vllm", "skyrl", "gem", "ray", "datasets"}
LIGHT = {"atropos_core", "numpy", "pydantic", "pluggy", "typer"}  # typer for a plugin's commands
IN_LIBRARIES = {"torch_models": {"torch", "transformers"}}  # docs/decisions/0030-libraries.md
LIGHT |= {f"atropos_{library.name}" for library in LIBRARIES}


def imports(path: Path) -> Iterator[str]:
    """Every top-level package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_core_imports_no_framework_and_no_plugin():
    ours = {f"atropos_{plugin.name}" for plugin in PLUGINS}
    for path in CORE.rglob("*.py"):
        assert not (FRAMEWORKS | ours) & set(imports(path)), path


def test_only_the_command_line_and_the_console_import_typer_and_rich():
    spec = CORE / "plugins" / "spec.py"  # names typer's type, for type checkers only
    for path in CORE.rglob("*.py"):
        if path != spec and path.parent not in (CORE / "cli", CORE / "console"):
            assert not {"typer", "rich"} & set(imports(path)), path


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_describes_itself_without_anything_heavy_and_imports_no_other_plugin(plugin):
    package = plugin / f"atropos_{plugin.name}"
    others = {f"atropos_{other.name}" for other in PLUGINS} - {package.name}
    for path in package.rglob("*.py"):
        assert not others & set(imports(path)), path
        if path.name in ("plugin.py", "config.py"):
            heavy = set(imports(path)) - LIGHT - {package.name} - set(sys.stdlib_module_names)
            assert not heavy, (path, heavy)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_name_of_a_library_derives_from_its_folder_and_it_imports_no_framework_but_its_own(library):
    project = tomllib.loads((library / "pyproject.toml").read_text())
    assert project["project"]["name"] == f"atropos-{library.name.replace('_', '-')}"
    [package] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert package == f"atropos_{library.name}"
    refused = FRAMEWORKS - {"datasets"} - IN_LIBRARIES.get(library.name, set())
    for path in (library / package).rglob("*.py"):
        assert not refused & set(imports(path)), path


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_every_name_of_a_plugin_derives_from_its_folder(plugin):
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"atropos-plugin-{plugin.name.replace('_', '-')}"
    assert project["entry-points"]["atropos"] == {plugin.name: f"atropos_{plugin.name}.plugin"}
    assert (plugin / f"atropos_{plugin.name}" / "__init__.py").is_file()
    assert (plugin / "README.md").is_file()
    assert list((plugin / "tests").glob("test_*.py"))


def test_importing_core_and_listing_plugins_imports_nothing_that_takes_long():
    script = (
        "import sys, atropos_core; from atropos_core.cli import run_app; "
        "code = run_app(['plugins']) or run_app(['--help']); "
        "sys.exit(code or bool({'torch', 'transformers', 'sympy', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_listing_of_plugins_imports_no_options_and_each_of_them_is_where_its_provider_says() -> None:
    program = (
        "import sys; from atropos_core.plugins.manager import load_plugins; found = load_plugins().registry.offers(); "
        "print(*(name for name in sys.modules if name.startswith('atropos_') and name.endswith('.config'))); "
        "print(all(issubclass(offer.provider.options, __import__('pydantic').BaseModel) for offer in found))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "\nTrue\n"


def test_a_listing_that_no_terminal_shows_imports_no_rich_and_help_builds_no_parser_of_a_command():
    script = (
        "import sys, typer.main; from atropos_core.cli import run_app\n"
        "built, make = [], typer.main.get_params_from_function\n"
        "typer.main.get_params_from_function = lambda one: built.append(one) or make(one)\n"
        "code = run_app(['--help'])\n"
        "code = code or str(built) if built else run_app(['plugins'])\n"
        "sys.exit(code or bool({'rich.console', 'rich.markdown'} & set(sys.modules)))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "TTY_COMPATIBLE")}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_help_says_the_same_whether_it_was_requested_or_no_command_was_given():
    asked, short, bare, of_one, short_of_one = (
        subprocess.run([sys.executable, "-m", "atropos_core", *words], capture_output=True, text=True, timeout=60)
        for words in (["--help"], ["-h"], [], ["run", "--help"], ["run", "-h"])
    )
    assert "Train\n  run " in asked.stdout and "\n  config " in asked.stdout
    assert asked.stdout == short.stdout == bare.stdout
    assert "--bridge" in of_one.stdout
    assert of_one.stdout == short_of_one.stdout
    assert (asked.returncode, short.returncode, bare.returncode, short_of_one.returncode) == (0, 0, 2, 0)


def test_the_import_rule_sees_an_import_inside_a_function(tmp_path):
    (tmp_path / "sly.py").write_text("def f():\n    from torch import nn\n")
    assert set(imports(tmp_path / "sly.py")) == {"torch"}
