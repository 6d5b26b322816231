"""Write docs/commands.md from the command line itself, in the groups of `atropos --help`.

Run from the project root: python -m tools.make_commands_page"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from atropos_core.cli import make_app
from atropos_core.cli.overview import GROUPS, OTHERS

PAGE = Path(__file__).parents[1] / "docs/commands.md"
HEAD = """# Commands

Made by `python -m tools.make_commands_page` from the commands of core and of the plugins in this repository.
`atropos COMMAND --help` shows the options of one, with examples.

"""
PAGES = {
    "adapter": "skyrl.md",
    "audit": "records.md",
    "bias": "credit.md",
    "bisect": "debugging.md",
    "check": "tutorial/03-environment.md",
    "config": "run-file.md",
    "doctor": "health.md",
    "engine": "roles.md",
    "env": "roles.md",
    "eval": "run-file.md",
    "export": "export.md",
    "import": "coming-from/atroposlib.md",
    "new": "tutorial/10-package.md",
    "plan": "gpu.md",
    "plot": "tutorial/02-look.md",
    "plugins": "plugins.md",
    "process": "export.md",
    "quantize": "../plugins/trainer_grpo/README.md",
    "recipes": "recipes.md",
    "replay": "debugging.md",
    "rescore": "debugging.md",
    "resume": "tutorial/08-resume.md",
    "run": "tutorial/01-first-run.md",
    "serve": "trajectory-api.md",
    "serve-agent": "agents.md",
    "simulate": "simulation.md",
    "skyrl-env": "skyrl.md",
    "tinker": "tinker.md",
    "train": "roles.md",
    "view": "view.md",
}


def commands() -> list[tuple[str, str, str]]:
    """Return the group of `atropos --help`, the words and the first sentence of each command, such as `config show`."""
    return list(below(typer.main.get_command(make_app()), "", OTHERS))


def below(command: click.Command, words: str, group: str) -> Iterator[tuple[str, str, str]]:
    for name, each in getattr(command, "commands", {}).items():
        full, panel = f"{words} {name}".strip(), getattr(each, "rich_help_panel", None)
        own = panel if panel in GROUPS else group
        if getattr(each, "commands", {}):
            yield from below(each, full, own)
        elif not each.hidden:
            yield own, full, first_sentence(each.help or "")


def first_sentence(text: str) -> str:
    paragraph = re.sub(r"\s+", " ", text.strip().partition("\n\n")[0])
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return sentence.rstrip(".") + "."


def page() -> str:
    found = commands()
    parts = [HEAD.rstrip("\n"), ""]
    for title in (*GROUPS, OTHERS):
        if rows := [(name, text) for group, name, text in found if group == title]:
            parts += [f"## {title}", "", "| command | what it does | more |", "|---|---|---|"]
            parts += [f"| `atropos {name}` | {cell(text)} | {link(name)} |" for name, text in rows]
            parts += [""]
    return "\n".join(parts).rstrip("\n") + "\n"


def cell(text: str) -> str:
    return re.sub(r"\[/?(?:bold|dim|italic)?\]", "", text).replace("|", "\\|")


def link(name: str) -> str:
    """Return a link to the page that shows the command at work, by the page's title."""
    if (target := PAGES.get(name.partition(" ")[0])) is None:
        return ""
    title = (PAGE.parent / target).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({target})"


if __name__ == "__main__":
    PAGE.write_text(page())
