"""What a library's or plugin's pyproject.toml has installed, some module of it imports."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PLUGINS = sorted(
    path.parent for storey in ("libs", "plugins") for path in REPOSITORY.glob(f"{storey}/*/pyproject.toml")
)
BY_ANOTHER = {  # which library that is imported does nothing without it
    ("bridge_checkpoint", "torch"): "transformers",
    ("bridge_lora", "torch"): "peft",
    ("engine_hf", "tokenizers"): "transformers",
    ("http_server", "uvloop"): "uvicorn",
    ("env_gem", "gem-llm"): "gem",  # its module
}


distributions = cache(packages_distributions)  # seconds


def imported(package: Path) -> set[str]:
    """Top-level modules, wherever in a file they are imported."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_every_package_that_a_plugin_has_installed_is_imported_by_it(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=~!; ]", line)[0].lower() for line in project.get("dependencies", ())}
    modules = imported(folder / f"atropos_{folder.name}")
    used = {name.lower() for module in modules for name in distributions().get(module, ())}
    used |= {name.replace("_", "-") for name in modules}  # of a package that is not installed here
    used |= {name for (plugin, name), library in BY_ANOTHER.items() if plugin == folder.name and library in modules}
    assert not (idle := sorted(names - used - {"atropos-core"})), f"no module imports {idle}: remove them"
