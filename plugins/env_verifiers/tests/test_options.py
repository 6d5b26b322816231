"""What is known without verifiers: the environment's options, and that verifiers is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_env_verifiers.config import VerifiersOptions


def has_verifiers() -> bool:
    try:
        return bool(version("verifiers"))
    except PackageNotFoundError:
        return False


def test_all_that_follows_the_colon_is_the_id_and_a_folder_is_where_the_run_file_says():
    provider = load_plugins().registry.find("environment", "verifiers:owner/name@1.0").provider
    assert provider.options().id == "owner/name@1.0"
    assert VerifiersOptions(id="name", folder="environments").folder.is_absolute()


def test_an_id_is_needed():
    with pytest.raises(ValidationError, match="(?s)id.*required"):
        VerifiersOptions()


@pytest.mark.skipif(has_verifiers(), reason="verifiers is installed here")
def test_a_package_that_is_missing_is_named_as_it_is_installed():
    with pytest.raises(FitError, match="'verifiers', which is not installed.*\n.*pip install verifiers"):
        check_requires(load_plugins().registry.find("environment", "verifiers"))


LOADS = """
import sys
sys.path.insert(0, sys.argv[1])
from atropos_core.errors import ConfigError
from atropos_env_verifiers.host import load
for id in sys.argv[2:]:
    try:
        load(id, {})
    except ConfigError as error:
        print(id, str(error).replace(chr(10), " "), sep="|")
"""
# Of an environment: what its module says, what the error says.
FAILING = {
    "gone": ("from verifiers import NoSuchThing", "gone.* verifiers 9.9.9: .*NoSuchThing.*0.1.14 to 0.2.1.*0.4.0.*pip install"),
    "gone_part": ("import verifiers.no.such", "verifiers 9.9.9: .*verifiers.no.*pip install verifiers==0.1.14"),
    "gone_name": ("import verifiers as vf\nvf.Removed", "verifiers 9.9.9: .*Removed.*pip install verifiers==0.1.14"),
    "gone_late": ("def load_environment():\n from verifiers import NoSuchThing", "verifiers 9.9.9: .*NoSuchThing"),
    "gone_inside": ("import verifiers.breaks", "verifiers 9.9.9: .*no_such_name.*pip install verifiers==0.1.14"),
    "needs": ("import no_such_package.a.b", "imports 'no_such_package', which is not.*pip install no_such_package$"),
    "needs_inside": ("import verifiers.needs", "imports 'no_such_package', which is not.*pip install no_such_package$"),
    "needs_part": ("import pydantic.no.such", f"pydantic {version('pydantic')} has not: .*Install a version of pydantic"),
    "needs_python": ("import json.no_such", "what Python 3.* has not"),
    "raises": ("raise ValueError('no seed')", "could not be imported: ValueError: no seed.*Look at its module"),
    "leaves": ("import sys; sys.exit('no')", "could not be imported: SystemExit: no.*Look at its module"),
    "asks_without_name": ("raise ModuleNotFoundError('install it')", "could not be imported: .*Look at its module"),
    "asks": ("raise ImportError('install it')", "could not be imported: ImportError: install it.*Look at its module"),
    "neither": ("x = 1", "'neither' has neither load_environment nor a Taskset in its module 'neither'.*Name the module"),
    "tasks": ("from verifiers.v1 import Taskset", "verifiers 9.9.9: .*pip install .*verifiers==0.4.0"),
}  # fmt: skip
NO_MODULES = ("", "owner/", "owner/a name", "..", "a..b")


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """Errors by environment, with a planted package `verifiers` that has `load_environment` and little else."""
    folder = tmp_path_factory.mktemp("modules")
    planted = {
        "verifiers-9.9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: verifiers\nVersion: 9.9.9\n",
        "verifiers-9.9.9.dist-info/top_level.txt": "verifiers\n",
        "verifiers/__init__.py": "class Environment: ...\ndef load_environment(): ...\n"
        "def __getattr__(name):\n raise AttributeError(f'module {__name__!r} has no attribute {name!r}')",
        "verifiers/v1/__init__.py": "",
        "verifiers/breaks.py": "from json import no_such_name",
        "verifiers/needs.py": "import no_such_package",
        "verifiers/clients.py": "Client = OpenAIChatCompletionsClient = OpenAICompletionsClient = object",
        "verifiers/utils/__init__.py": "",
        "verifiers/utils/error_utils.py": "ErrorChain = object",
        "verifiers/finds.py": "def harness(id):\n raise ModuleNotFoundError(f'harness {id!r} not found')",
        "harnessed.py": "import verifiers.finds\ndef load_environment():\n verifiers.finds.harness('nope')",
        "configured.py": "def load_environment():\n raise ValueError('no seed')",
        **{f"{name}.py": text for name, (text, _) in FAILING.items()},
    }
    for name, text in planted.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    ids = (*FAILING, "configured", "harnessed", "not_there", "not.there", *NO_MODULES)
    command = [sys.executable, "-c", LOADS, str(folder), *ids]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.splitlines()
    return dict(line.split("|", 1) for line in lines)


@pytest.mark.parametrize("name", FAILING)
def test_what_cannot_be_imported_names_what_it_needs_and_no_configuration(said, name):
    assert re.search(FAILING[name][1], said[name])
    assert "config]" not in said[name]


def test_what_cannot_be_made_names_the_configuration_and_what_is_not_there_its_package(said):
    assert re.search(
        r"could not be loaded: ValueError: no seed.*Look at \[environment.NAME.config\]", said["configured"]
    )
    assert re.search(r"could not be loaded: .*'nope' not found.*Look at \[environment.NAME.config\]", said["harnessed"])
    for name in NO_MODULES:
        assert said[name].startswith(f"verifiers' environment {name!r} does not name a module.")
    for name in ("not_there", "not.there"):
        assert "has no module" in said[name] and "folder in [environment.NAME]" in said[name]
