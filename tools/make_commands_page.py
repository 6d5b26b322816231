"""Writes docs/commands.md from the command line itself. Run from the project root: python -m tools.make_commands_page"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import typer

from atropos_core.cli import make_app

PAGE = Path(__file__).parents[1] / "docs/commands.md"
HEAD = """# Commands

Made by `python -m tools.make_commands_page` from the commands of core and of the plugins in this repository.
`atropos COMMAND --help` shows the options of one, with examples.

"""
GROUPS = {
    "Train": ("run", "resume", "eval", "process", "export"),
    "Look at a run": ("view", "plot", "doctor", "audit", "simulate"),
    "Choose what fits": ("plan", "quantize", "config schema", "config show"),
    "Plugins": ("plugins", "new", "check", "import", "completion"),
    "A run on several machines": ("serve", "train", "env", "engine", "serve-agent"),
    "Other trainers": ("adapter", "skyrl-env"),
}
PAGES = {
    "adapter": "skyrl.md",
    "audit": "records.md",
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
    "resume": "tutorial/08-resume.md",
    "run": "tutorial/01-first-run.md",
    "serve": "trajectory-api.md",
    "serve-agent": "agents.md",
    "simulate": "simulation.md",
    "skyrl-env": "skyrl.md",
    "train": "roles.md",
    "view": "view.md",
}


def commands() -> dict[str, str]:
    """The first sentence of each command's help, by its words: `config show`."""
    return dict(below(typer.main.get_command(make_app()), ""))


def below(command: click.Command, words: str) -> Iterator[tuple[str, str]]:
    for name, each in getattr(command, "commands", {}).items():
        full = f"{words} {name}".strip()
        if getattr(each, "commands", {}):
            yield from below(each, full)
        elif not each.hidden:
            yield full, first_sentence(each.help or "")


def first_sentence(text: str) -> str:
    paragraph = re.sub(r"\s+", " ", text.strip().partition("\n\n")[0])
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return sentence.rstrip(".") + "."


def group_of(command: str) -> str | None:
    return next((title for title, names in GROUPS.items() if {command, command.partition(" ")[0]} & {*names}), None)


def page() -> str:
    found = commands()
    parts = [HEAD.rstrip("\n"), ""]
    for title in (*GROUPS, None):
        rows = [name for name in found if group_of(name) == title]
        if title is not None:
            rows.sort(key=lambda name: place(title, name))
        if rows:
            parts += [f"## {title or 'Others'}", "", "| command | what it does | more |", "|---|---|---|"]
            parts += [f"| `atropos {name}` | {cell(found[name])} | {link(name)} |" for name in rows]
            parts += [""]
    return "\n".join(parts).rstrip("\n") + "\n"


def place(title: str, name: str) -> int:
    names = GROUPS[title]
    return names.index(name if name in names else name.partition(" ")[0])


def cell(text: str) -> str:
    return re.sub(r"\[/?(?:bold|dim|italic)?\]", "", text).replace("|", "\\|")


def link(name: str) -> str:
    """The page that shows the command at work, by the page's title."""
    if (target := PAGES.get(name.partition(" ")[0])) is None:
        return ""
    title = (PAGE.parent / target).read_text().partition("\n")[0].removeprefix("# ")
    return f"[{title}]({target})"


if __name__ == "__main__":
    PAGE.write_text(page())
