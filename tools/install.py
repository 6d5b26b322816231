"""Install packages into an environment of this checkout.

    python tools/install.py NAME                    .venv-NAME from environments/NAME.txt and environments/packages.toml
    python tools/install.py .venv-NAME ARGUMENTS    `uv pip install ARGUMENTS` into .venv-NAME

An argument @all or @PLUGIN stands for packages of this checkout.

The environment is created if it is missing, by the Python that runs this. uv installs instead of pip: it unpacks a package once and
links it into each environment, so that thirteen environments with torch take the time and the disk space of one. uv itself is
installed into `.venv-uv`. uv does not read pip.conf, so pip's indexes, certificates and constraints are handed to it here.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
UV = REPOSITORY / ".venv-uv/bin/uv"
PINS = REPOSITORY / "environments"
CONSTRAINTS = ["-c", "environments/constraints.txt"]
EXTRAS = {"sinks": "[mlflow,tensorboard,trackio,wandb]", "torch_models": "[gguf]"}  # also installed, with a package
WORLDS = {"env_gem", "env_reasoning_gym", "env_textarena", "env_verifiers"}  # want versions of their own
UV_VARIABLES = {  # pip's setting -> uv's variable
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
DEFAULT = re.compile(r"--index-url <url>.*?\(default\s+(\S+)\)", re.DOTALL)  # in the help of `pip install`


def uv_variables(listed: str, help_text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for uv, of what `pip config list` says, a line `global.index-url='...'` for each setting, and the help of `pip install`.
    Settings of the environment, `:env:`, win over files. What uv itself is told by variables of its own stays."""
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    for key, _, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[name] = " ".join(str(ast.literal_eval(value)).split())
    found = {UV_VARIABLES[name]: value for name, value in settings.items() if name in UV_VARIABLES}
    found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # all indexes are equal to pip
    by_default = DEFAULT.search(help_text)
    indexes = settings.get("index-url", by_default[1] if by_default else "").split()
    indexes += settings.get("extra-index-url", "").split()
    # uv searches its default index last, and of equal versions takes the first that it finds, whichever wheel it is of
    if indexes:
        found["UV_INDEX"], found["UV_DEFAULT_INDEX"] = " ".join(indexes), indexes[-1]
    return {name: value for name, value in found.items() if name not in environment}


def uv_environment() -> dict[str, str]:
    """Return the variables to run uv with. Install uv first if it is missing."""
    folder, python, constraints = UV.parent.parent, UV.with_name("python"), REPOSITORY / "environments/constraints.txt"
    pip, help_text = [python, "-m", "pip", "--disable-pip-version-check"], folder / "pip-install-help.txt"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make -j` installs several environments at once
        if not help_text.exists() or help_text.stat().st_mtime < constraints.stat().st_mtime:
            run([sys.executable, "-m", "venv", folder])
            run([*pip, "install", "-q", "-c", constraints, "uv"])
            help_text.write_text(said_by([*pip, "install", "--help"]))
    return {**os.environ, **uv_variables(said_by([*pip, "config", "list"]), help_text.read_text(), os.environ)}


def without_folder(listed: str) -> list[str]:
    """Return the editable packages whose folder is gone, because a plugin was merged or renamed, from `uv pip list --format json`."""
    packages = json.loads(listed or "[]")
    return [one["name"] for one in packages if not Path(one["editable_project_location"], "pyproject.toml").is_file()]


def said_by(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def run(command: list[str | Path], environment: Mapping[str, str] | None = None) -> None:
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    if ended:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended}")


def install(target: Path, arguments: Sequence[str]) -> None:
    """Run `uv pip install` with these arguments for the environment in the directory `target`."""
    environment = uv_environment()
    if "--require-hashes" in arguments:  # everything is pinned, and a constraint without hashes is refused
        environment.pop("UV_CONSTRAINT", None)
    python = target / "bin/python"
    if not os.access(python, os.X_OK):
        run([UV, "venv", "-q", "--seed", "--allow-existing", "--python", sys.executable, target], environment)
    run([UV, "pip", "install", "-q", "--python", python, *arguments], environment)
    if gone := without_folder(said_by([UV, "pip", "list", "--editable", "--format", "json", "--python", python])):
        run([UV, "pip", "uninstall", "-q", "--python", python, *gone])


def make(name: str, how: Mapping[str, Any]) -> None:
    """Make the environment .venv-NAME. `how` is its table in packages.toml, which explains the keys."""
    target = REPOSITORY / f".venv-{name}"
    first, end = (tuple(map(int, str(version).split("."))) for version in how.get("python", ["3.11", "4.0"]))
    if not first <= sys.version_info[:2] < end:
        sys.exit(f"{how['because']}; this is {sys.version}")
    size = how.get("size", "1 to 2 GB, mostly torch" if "torch" in how else "less than 2 GB")
    print(f"installing environments/{name}.txt into {target.name} ({size})", flush=True)
    alone = [] if "deps" in how else ["--no-deps"]
    hashes = ["--require-hashes"] if "hashes" in how else []
    install(target, [*alone, *hashes, "-r", f"environments/{name}.txt"])
    if "torch" in how:
        install(target, [*alone, *CONSTRAINTS, "torch"])
    if packages := how.get("packages"):
        install(target, [*alone, *CONSTRAINTS, "--no-build-isolation", *editable(packages)])
    python = target / "bin/python"
    if "check" in how:
        run([UV, "pip", "check", "-q", "--python", python], uv_environment())
    if "finish" in how:
        run([python, "-c", how["finish"]])
    if "imports" in how:
        run([python, "-c", f"import {', '.join(how['imports'])}"])
    (target / "stamp").touch()


def editable(packages: Iterable[str]) -> list[str]:
    """Return uv's arguments that install these packages of the checkout. packages.toml says what the names mean."""
    libraries, plugins = (
        {
            path.parent.name: f"./{folder}/{path.parent.name}{EXTRAS.get(path.parent.name, '')}"
            for path in sorted(REPOSITORY.glob(f"{folder}/*/pyproject.toml"))
        }
        for folder in ("libs", "plugins")
    )
    sets = {
        "core": [".", *libraries.values()],
        "all": [
            ".",
            *libraries.values(),
            *(path for name, path in plugins.items() if name not in {*WORLDS, "launcher_ray"}),
        ],
        "worlds": [path for name, path in plugins.items() if name in WORLDS],
    }
    paths = [path for name in packages for path in sets.get(name, [plugins.get(name, name)])]
    return [argument for path in paths for argument in ("-e", path)]


if __name__ == "__main__":
    if len(sys.argv) == 2 and (PINS / f"{sys.argv[1]}.txt").is_file():
        make(sys.argv[1], tomllib.loads((PINS / "packages.toml").read_text())[sys.argv[1]])
    elif len(sys.argv) > 2:
        given = ([argument] if argument[:1] != "@" else editable([argument[1:]]) for argument in sys.argv[2:])
        install(REPOSITORY / sys.argv[1], [argument for arguments in given for argument in arguments])
    else:
        sys.exit(__doc__)
