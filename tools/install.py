"""Install packages into an environment of this checkout: python tools/install.py .venv-NAME ARGUMENTS OF uv pip install

The environment is made where there is none, by the Python that runs this. uv installs, in place of pip: it unpacks a package once and
links it into each environment that has it, so that thirteen environments with torch take the time and the disk of one. A version of its
own is put into `.venv-uv`. uv reads no pip.conf: indexes, certificates and constraints that pip is configured with are handed to it here.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
UV = REPOSITORY / ".venv-uv/bin/uv"
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


def said_by(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def run(command: list[str | Path], environment: Mapping[str, str] | None = None) -> None:
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    if ended:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended}")


def install(target: Path, arguments: list[str]) -> None:
    environment = uv_environment()
    if "--require-hashes" in arguments:  # all is pinned, and a constraint without hashes is refused
        environment.pop("UV_CONSTRAINT", None)
    python = target / "bin/python"
    if not os.access(python, os.X_OK):
        run([UV, "venv", "-q", "--seed", "--allow-existing", "--python", sys.executable, target], environment)
    run([UV, "pip", "install", "-q", "--python", python, *arguments], environment)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    install(REPOSITORY / sys.argv[1], sys.argv[2:])
