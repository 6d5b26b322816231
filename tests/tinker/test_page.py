"""The examples of docs/tinker.md, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

from tests.pages.blocks import BLOCKS
from tests.tinker.server import CLIENT, TinkerServer, tinker_server

ROOT = Path(__file__).parents[2]
PAGES = ("docs/tinker.md", "plugins/tinker_api/README.md")


def block(begins: str) -> str:
    [found] = [one.text for one in BLOCKS if one.page == PAGES[0] and one.text.startswith(begins)]
    return found


def commands() -> list[list[str]]:
    """Return the arguments of each `atropos tinker` in the pages' blocks."""
    lines = [line for one in BLOCKS if one.page in PAGES for line in one.text.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("atropos tinker")]


def test_the_script_of_the_page_runs_with_the_variables_of_the_page(tmp_path: Path) -> None:
    arguments = next(one for one in commands() if "--dir" in one)
    assert arguments == ["--model", "tiny", "--dir", "tinker"] and ["--model", "tiny"] in commands()
    with tinker_server(tmp_path, "tiny") as server:
        export, run = block("export TINKER_BASE_URL").splitlines()
        variables = dict(one.split("=", 1) for one in export.removeprefix("export ").split())
        assert run == "python first.py" and re.fullmatch(r"http://127\.0\.0\.1:8020", variables["TINKER_BASE_URL"])
        (tmp_path / "first.py").write_text(block("import tinker"))
        said = subprocess.run(
            [CLIENT, "-W", "ignore", "first.py"],
            cwd=tmp_path,
            env={**os.environ, **variables, "TINKER_BASE_URL": server.url, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert said.returncode == 0, said.stderr[-2000:]
    *steps, path, answer = said.stdout.splitlines()
    losses = [float(line.split()[1]) for line in steps]
    page = " ".join((ROOT / PAGES[0]).read_text().split())
    assert f"The loss falls from {losses[0]:.0f} to below 0.1, and the last line is `{answer}`." in page
    assert losses[-1] < 0.1 and path.endswith("/weights/twenty") and answer == "30=42"


def test_the_key_of_the_page_opens_the_server_for_others(tmp_path: Path) -> None:
    make, serve = block("(umask 077").splitlines()
    subprocess.run(make, shell=True, cwd=tmp_path, check=True, timeout=60)
    key = (tmp_path / "key").read_text().strip()
    arguments = shlex.split(serve)[2:]
    assert arguments in commands()
    server = TinkerServer(tmp_path, "tiny", tuple(arguments), key=key)
    server.start()
    try:
        assert server.call("POST", "create_session", {})[0] == 200
        assert server.call("POST", "create_session", {}, **{"x-api-key": "tml-local"})[0] == 401
    finally:
        server.stop()
