"""`atropos new`: each kind makes a plugin that passes its own tests, installs, and is found by name."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core.errors import ConfigError
from atropos_core.plugins.manager import load_plugins
from atropos_testing.new_command import KINDS, MAX_NAME, TEMPLATES, check_name, render, write
from tests import wheels
from tests.conftest import in_front

REGISTRY = load_plugins([]).registry
PYTHON = (sys.executable, "-m")
PYTEST = (*PYTHON, "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin")
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a plugin needs no other, and schemathesis takes long to import


def ok(*command: str, cwd: Path, **environment: str) -> str:
    whole = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | environment
    ended = subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_passes_its_own_tests_at_once(kind: str, tmp_path: Path) -> None:
    folder = write(kind, "hello_world", tmp_path)
    out = ok(*PYTEST, cwd=folder, **ALONE)
    assert "passed" in out and "skipped" not in out


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: write(kind, "hello", folder) for kind in KINDS}


EVERY_KIND = [*((kind, False) for kind in KINDS), ("environment", True)]


@pytest.fixture(scope="module")
def types_read(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of mypy's cache: it reads the types of core, pydantic and torch once for all kinds."""
    return str(tmp_path_factory.mktemp("mypy"))


@pytest.mark.parametrize(("kind", "tools"), EVERY_KIND)
def test_a_new_plugin_is_formatted_linted_and_typed_by_what_its_folder_says(
    kind: str, tools: bool, types_read: str, tmp_path: Path
) -> None:
    folder = write(kind, "hello_world", tmp_path, tools=tools)
    ok(*PYTHON, "ruff", "check", "--no-cache", ".", cwd=folder)
    ok(*PYTHON, "ruff", "check", "--no-cache", "--select", "E,F,I,UP,B", ".", cwd=folder)
    ok(*PYTHON, "ruff", "format", "--no-cache", "--check", ".", cwd=folder)
    ok(*PYTHON, "mypy", "--strict", "--cache-dir", types_read, ".", cwd=folder)


@pytest.mark.parametrize(("kind", "tools"), EVERY_KIND)
@pytest.mark.parametrize("name", ["a", "a" * MAX_NAME])
def test_a_new_plugin_is_formatted_and_linted_with_a_short_and_with_a_long_name(
    kind: str, tools: bool, name: str, tmp_path: Path
) -> None:
    folder = write(kind, name, tmp_path, tools=tools)
    ok(*PYTHON, "ruff", "check", "--no-cache", ".", cwd=folder)
    ok(*PYTHON, "ruff", "format", "--no-cache", "--check", ".", cwd=folder)


def test_a_new_environment_with_tools_passes_its_own_tests_at_once(tmp_path: Path) -> None:
    folder = write("environment", "hello_world", tmp_path, tools=True)
    assert "4 passed" in ok(*PYTEST, cwd=folder, **ALONE)
    assert set(render("environment", "a", tools=True)) == set(render("environment", "a"))


@pytest.fixture(scope="module")
def installed(every_kind: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the wheel of each kind is unpacked."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels.build(folder, *every_kind.values())
    for kind, made in every_kind.items():
        with zipfile.ZipFile(folder / f"atropos_plugin_{made.name}-0.1.0-py3-none-any.whl") as file:
            file.extractall(folder / kind)
    return {kind: folder / kind for kind in every_kind}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_installs_as_a_wheel_and_is_found_by_name(
    kind: str, every_kind: dict[str, Path], installed: dict[str, Path], tmp_path: Path
) -> None:
    assert (installed[kind] / f"atropos_{every_kind[kind].name}/py.typed").is_file()
    found = in_front(installed[kind])
    out = ok(*PYTHON, "atropos_core", "check", "hello", cwd=tmp_path, PYTHONPATH=found, COLUMNS="160")
    assert f"{kind} 'hello' fulfills its contract." in out


@pytest.mark.parametrize(("kind", "tools"), EVERY_KIND)
def test_every_option_of_a_new_plugin_has_a_meaning_to_show(kind: str, tools: bool) -> None:
    texts = [text for path, text in render(kind, "hello", tools=tools).items() if path.name == "config.py"]
    assert len(texts) == (kind != "loss"), "which has no options"
    for text in texts:
        made: dict[str, Any] = {}
        exec(compile(text, f"{kind}/config.py", "exec", dont_inherit=True), made)
        options = made["HelloOptions"].model_fields
        assert options and all(field.description for field in options.values())


def test_every_name_follows_from_one() -> None:
    files = render("environment", "word_count")
    pyproject = files[Path("pyproject.toml")]
    assert 'name = "atropos-plugin-env-word-count"' in pyproject
    assert 'env_word_count = "atropos_env_word_count.plugin"' in pyproject
    assert "class WordCount(Environment):" in files[Path("atropos_env_word_count/environment.py")]
    assert not [path for path, text in files.items() if "$" in text]


@pytest.mark.parametrize(
    "name", ["Hello", "hello-world", "1st", "", "hello__world", "import", "_x", "x_", "a" * (MAX_NAME + 1), "é"]
)
def test_a_name_that_no_package_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a plugin's name"):
        check_name("environment", name, REGISTRY)


def test_a_bad_name_comes_with_a_good_one() -> None:
    with pytest.raises(ConfigError, match="atropos new reward hello_world"):
        check_name("reward", "Hello-World!", REGISTRY)


def test_the_name_of_an_installed_component_is_refused() -> None:
    with pytest.raises(ConfigError, match="a reward named 'numeric' already, from atropos-core"):
        check_name("reward", "numeric", REGISTRY)
    check_name("environment", "numeric", REGISTRY)  # another kind is another name


def test_an_unknown_kind_suggests_the_near_miss() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'environment'"):
        check_name("enviroment", "x", REGISTRY)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "env_hello").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        write("environment", "hello", tmp_path)
    assert not list((tmp_path / "env_hello").iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"env_hello cannot be written: Not a directory\."):
        write("environment", "hello", tmp_path / "file")


def test_the_command_says_what_comes_next(atropos: Callable[..., Any]) -> None:
    ended = atropos("new", "environment", "hello")
    assert ended.code == 0, ended.err
    for line in (
        "pip install -e './env_hello[test]'",
        "atropos check hello --kind environment",
        "atropos run --model toy --env hello",
    ):
        assert line in ended.out


def test_the_command_refuses_in_two_lines(atropos: Callable[..., Any]) -> None:
    ended = atropos("new", "environment", "Hello")
    assert ended.code == 2
    assert "Traceback" not in ended.err and "What to do: atropos new environment hello" in ended.err


def test_the_templates_are_in_the_wheel(tmp_path: Path) -> None:
    testing = TEMPLATES.parents[1]
    ok(
        *PYTHON,
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        ".",
        cwd=testing,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.endswith(".tmpl")}
    assert packed == {str(path.relative_to(testing)) for path in TEMPLATES.rglob("*.tmpl")} != set()
