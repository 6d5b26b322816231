"""Run the `atropos simulate` commands that the pages show, with the figures of the page."""

from __future__ import annotations

import shlex
from pathlib import Path

from atropos_core.cli import run_app
from plugins.simulation.tests.test_measured import write_run
from tests.pages.blocks import BLOCKS

BIG = """
[environment.gsm8k]
[bridge]
use = "checkpoint"
[launcher]
use = "./spanning.py:Spanning"
"""
SPANNING = """
from atropos_core.processes.local import LocalLauncher

class Spanning(LocalLauncher):
    several_machines = True
"""


def test_the_commands_of_the_pages_print_a_table(tmp_path, monkeypatch, capsys):
    """Use a launcher that may span machines instead of a Ray cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    pages = [block for block in BLOCKS if block.page in ("docs/simulation.md", "plugins/simulation/README.md")]
    [table] = [block.text for block in pages if block.first == "[run]" or block.first.startswith("[run] ")]
    Path("cluster.toml").write_text(table)
    Path("big.toml").write_text(BIG)
    Path("spanning.py").write_text(SPANNING)
    Path("runs").mkdir()
    write_run(tmp_path / "runs" / "mine")
    commands = [
        line for block in pages if block.first.startswith("atropos simulate") for line in block.text.splitlines()
    ]
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command)[1:]
        if "--dry-run" in words:  # a dry run takes figures that a run does not record only from a file
            at = words.index("--launcher")
            words = [*words[:at], *words[at + 2 :]]
            words[words.index("--figures") + 1] = "cluster.toml"
        capsys.readouterr()
        assert run_app(words) == 0, command
        said = capsys.readouterr().out
        assert "saturates first" in said, (command, said)
