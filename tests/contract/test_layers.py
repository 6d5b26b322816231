"""Which way imports may go. import-linter's contracts are in pyproject.toml, and `make lint` checks them; what they cannot see is
checked here: a plugin that is named in a string, and another module's private names. Each is seen to fail on a planted violation."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from atropos_core.cli import OWN
from atropos_core.plugins.offers import KINDS
from tests.conftest import REPOSITORY

CORE = REPOSITORY / "atropos_core"
PACKAGES = {path.parent.name: path for path in (REPOSITORY / "plugins").glob("*/atropos_*") if path.is_dir()}
LIBRARIES = {path.parent.name: path for path in (REPOSITORY / "libs").glob("*/atropos_*") if path.is_dir()}
BELOW = {"debugging": {"records"}, "evaluation": {"chat_client"}}  # library -> the libraries that it may name
CHECKED = [CORE, *LIBRARIES.values(), *PACKAGES.values(), *REPOSITORY.glob("[lp]*s/*/tests")]
CHECKED += [REPOSITORY / name for name in ("tests", "benchmarks", "tools")]
DECISION = REPOSITORY / "docs/decisions/0014-folders.md"
OF_NAMEDTUPLES = {"_make", "_replace", "_fields", "_asdict"}  # public, and named so that no field is called like them


def lint(where: Path) -> subprocess.CompletedProcess[str]:
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", script, "--no-cache"],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(where), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@dataclass(frozen=True)
class Copy:
    """Core, the libraries and all plugins in one folder, to plant something in."""

    folder: Path


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    folder = tmp_path_factory.mktemp("copy")
    for package in (CORE, *LIBRARIES.values(), *PACKAGES.values()):
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return Copy(folder)


def names_a_plugin(path: Path, own: str = "", also: Iterable[str] = ()) -> str | None:
    """The first package of a plugin, other than `own`, or of `also`, that is named anywhere in a file."""
    hooks = set(KINDS.values())  # `atropos_sinks` is a hook too: only a module of it names the plugin
    others = [f"atropos_{name}" for name in sorted({*PACKAGES, *also} - {own})]
    patterns = "|".join(one + (r"\.\w" if one in hooks else r"\b") for one in others)
    found = re.search(rf"\b({patterns})", path.read_text())
    return found[0] if found else None


def private_names(path: Path) -> Iterator[str]:
    """Names with an underscore that a file takes from another module of ours: `from x import _y`, or `x._y` where x was imported."""
    tree = ast.parse(path.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or is_ours(node.module or "")):
            imported |= {alias.asname or alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names if is_ours(alias.name)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(owner), name) if owner in imported and is_private(name):
                if name not in OF_NAMEDTUPLES:
                    yield f"{owner}.{name}"


def is_ours(module: str) -> bool:
    return module.startswith("atropos_") or module.split(".")[0] in ("tests", "benchmarks", "tools")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_package_is_in_the_contracts_of_imports():
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages, libraries = ({f"atropos_{name}" for name in storey} for storey in (PACKAGES, LIBRARIES))
    assert set(contracts["root_packages"]) == packages | libraries | {"atropos_core"}
    plugins, layers, folders, *_ = contracts["contracts"]
    assert plugins["modules"] == ["*"]
    assert {re.findall(r"\w+", one)[0] for one in plugins["ignore_imports"]} == libraries | {"atropos_core"}
    *storeys, core = layers["layers"]
    assert sorted(re.findall(r"\w+", " ".join(storeys))) == sorted(libraries) and core == "atropos_core"
    # that every folder and module of core is in them, the contract itself sees to: it is exhaustive
    assert len(folders["layers"]) == len(re.findall(r"^\| \d+ \|", DECISION.read_text(), re.M)), (
        f"{DECISION} has a row for each layer"
    )


def test_every_package_is_in_uvs_workspace():
    sources = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    projects = [
        *REPOSITORY.glob("*/*/pyproject.toml"),
        REPOSITORY / "distribution/pyproject.toml",
        REPOSITORY / "pyproject.toml",
    ]
    names = {tomllib.loads(path.read_text())["project"]["name"] for path in projects}
    assert set(sources) == names, "[tool.uv.sources] in pyproject.toml has a line for each package"
    assert all(source == {"workspace": True} for source in sources.values())


PLANTED = {
    "core and a plugin": (
        "atropos_core/launch/awake.py",
        "import atropos_curriculum.plugin",
        "atropos_core is not allowed to import atropos_curriculum",
    ),
    "inside a function": (
        "atropos_core/launch/awake.py",
        "def f():\n    from atropos_engine_hf import engine",
        "atropos_core is not allowed to import atropos_engine_hf",
    ),
    "core and a library": (
        "atropos_core/launch/awake.py",
        "def f():\n    import atropos_testing.report",
        "atropos_core is not allowed to import atropos_testing",
    ),
    "a library and a plugin": (
        "atropos_env_kit/actions.py",
        "import atropos_env_gem.plugin",
        "atropos_env_kit is not allowed to import atropos_env_gem",
    ),
    "two libraries": (
        "atropos_env_kit/actions.py",
        "import atropos_http_server.connection_limits",
        "atropos_env_kit is not allowed to import atropos_http_server",
    ),
    "a library and one of a layer above": (
        "atropos_chat_client/retries.py",
        "import atropos_evaluation.policies",
        "atropos_chat_client is not allowed to import atropos_evaluation",
    ),
    "two plugins": (
        "atropos_bridge_ipc/plugin.py",
        "import atropos_bridge_lora.bridge",
        "atropos_bridge_ipc is not allowed to import atropos_bridge_lora",
    ),
    "a folder and one above it": (
        "atropos_core/hub/subset_sum.py",
        "def f():\n    from atropos_core.launch import plan",
        "atropos_core.hub is not allowed to import atropos_core.launch",
    ),
    "the root and a folder": (
        "atropos_core/seeds.py",
        "from atropos_core.storage.atomic import sync",
        "atropos_core.seeds is not allowed to import atropos_core.storage",
    ),
    "the state of the API's server and an endpoint": (
        "atropos_trajectory_api/service/draws.py",
        "def f():\n    from atropos_trajectory_api.native import routes",
        "atropos_trajectory_api.service is not allowed to import atropos_trajectory_api.native",
    ),
    "the sandboxes of agents and their environment": (
        "atropos_agent_api/sandboxes/monitor.py",
        "def f():\n    from atropos_agent_api.environment import agent",
        "atropos_agent_api.sandboxes is not allowed to import atropos_agent_api.environment",
    ),
    "a loss and the trainer's update": (
        "atropos_trainer_grpo/losses/rows.py",
        "def f():\n    from atropos_trainer_grpo import update",
        "atropos_trainer_grpo.losses is not allowed to import atropos_trainer_grpo.update",
    ),
}


def test_the_contracts_hold(copied):
    ended = lint(copied.folder)
    assert (ended.returncode, "0 broken" in ended.stdout) == (0, True), ended.stdout + ended.stderr


@pytest.mark.parametrize(("where", "line", "broken"), PLANTED.values(), ids=PLANTED)
def test_an_import_the_other_way_breaks_a_contract(copied, where, line, broken):
    path = copied.folder / where
    text = path.read_text()
    path.write_text(f"{text}\n{line}\n")
    try:
        ended = lint(copied.folder)
    finally:
        path.write_text(text)
    assert ended.returncode == 1
    assert broken in ended.stdout, ended.stdout + ended.stderr


SCAFFOLDS = {"loss": "trainer_grpo", "sandbox": "agent_api"}  # kinds that a plugin alone takes


def test_core_and_libraries_name_no_plugin_and_no_plugin_another_in_a_string_either():
    """Except the templates of `atropos new` for a kind that one plugin takes, and recipes, which are run files for plugins."""
    own = {LIBRARIES["testing"] / "templates" / kind: plugin for kind, plugin in SCAFFOLDS.items()}
    named = {path: names_a_plugin(path, also=LIBRARIES) for path in CORE.rglob("*.py")}
    for name, package in LIBRARIES.items():
        named |= {
            path: names_a_plugin(
                path,
                next((own[folder] for folder in path.parents if folder in own), name),
                set(LIBRARIES) - {name, *BELOW.get(name, ())},
            )
            for path in package.rglob("*")
            if path.suffix in (".py", ".tmpl", ".toml", ".md") and path.parent != LIBRARIES["recipes"] / "run_files"
        }
    for name, package in PACKAGES.items():
        named |= {path: names_a_plugin(path, name) for path in package.rglob("*.py")}
    assert not {path: found for path, found in named.items() if found}


@pytest.mark.parametrize(
    "text",
    ['SERVER = "atropos_trajectory_api.engine_http.server:open_engine_server"', "f'-m atropos_trajectory_api.x'"],
)
def test_a_plugin_named_in_a_string_is_seen(tmp_path, text):
    (tmp_path / "sly.py").write_text(text)
    assert names_a_plugin(tmp_path / "sly.py") == "atropos_trajectory_api"
    assert names_a_plugin(tmp_path / "sly.py", "trajectory_api") is None


@pytest.mark.parametrize("folder", CHECKED, ids=lambda folder: str(folder.relative_to(REPOSITORY)))
def test_no_module_takes_a_private_name_of_another(folder):
    taken = {str(path.relative_to(REPOSITORY)): list(private_names(path)) for path in folder.rglob("*.py")}
    assert not {path: names for path, names in taken.items() if names}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("from atropos_core.hub.hub import _Entry", ["_Entry"]),
        ("def f():\n    from .hub import Hub, _Entry as Entry", ["_Entry"]),
        ("from atropos_core.hub import hub\nhub._entry()", ["hub._entry"]),
        ("import atropos_core.hub.hub as hub\nhub._entry()", ["hub._entry"]),
        ("from atropos_core.hub.hub import Hub\nHub._count = 3\nself._mine = os._exit", ["Hub._count"]),
        ("import os\nfrom atropos_core.types import Row\nRow._make(())\nos._exit(0)\nfrom __future__ import annotations", []),
    ],
)  # fmt: skip
def test_a_private_name_that_is_taken_is_seen(tmp_path, text, seen):
    (tmp_path / "sly.py").write_text(text)
    assert list(private_names(tmp_path / "sly.py")) == seen


STARTED = {  # by `python -m`
    "atropos_core.__main__",
    "atropos_core.processes.child_main",
    "atropos_core.rollouts.template_process",
}
TYPED = {f"atropos_core.cli.{module}" for module in OWN.values()}  # imported when its command is


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """The modules of core that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atropos_core"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_core_has_what_core_or_two_plugins_need():
    modules = {dotted(path) for path in CORE.rglob("*.py") if path.name != "__init__.py"}
    used = {name for path in CORE.rglob("*.py") for name in imported(path) if name != dotted(path)}
    users: dict[str, set[str]] = {}
    for name, package in {**PACKAGES, **LIBRARIES}.items():
        for one in {one for path in package.rglob("*.py") for one in imported(path)}:
            users.setdefault(one, set()).add(name)
    offered = {name for name in modules if name.startswith("atropos_core.builtin.")}  # by name, in run files
    alone = modules - used - STARTED - TYPED - offered
    assert {name: users.get(name) for name in alone if len(users.get(name, ())) < 2} == {}


def missing_imports(text: str) -> Iterator[str]:
    """The names that the text of a template imports from our packages and that are not there."""
    for module, names in re.findall(r"^.*?\bfrom (atropos_[\w.]+) import ([\w, ]+)", text, re.MULTILINE):
        there = importlib.import_module(module)
        yield from (f"{module}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", names) if not hasattr(there, name))


def test_templates_import_what_there_is():
    """No type checker reads them."""
    templates = [path for folder in ("libs", "plugins") for path in (REPOSITORY / folder).rglob("*.tmpl")]
    missing = {str(path.relative_to(REPOSITORY)): list(missing_imports(path.read_text())) for path in templates}
    assert templates and {path: names for path, names in missing.items() if names} == {}
    assert list(missing_imports("${typing}from atropos_core.types import Score, Scores")) == [
        "atropos_core.types.Scores"
    ]


def test_the_root_of_core_has_thirteen_modules_at_most():
    assert len(list(CORE.glob("*.py"))) <= 13
