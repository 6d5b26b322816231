"""Writes docs/plugins.md from what the plugins of this repository say of themselves. Run: python -m tools.make_plugins_page"""

from __future__ import annotations

import tomllib
from pathlib import Path

from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.offers import KINDS

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs/plugins.md"
HEAD = """# Plugins

Made by `python -m tools.make_plugins_page`. `atropos plugins` prints the same table for what is installed, and `atropos plugins NAME` the
options of one component. `atropos new KIND NAME` writes a plugin of your own ([tutorial](tutorial/10-package.md)); a class in a file
works without a package ([hooks.md](hooks.md)).
"""
CHOSEN_BY = {
    "adapter": "`atropos adapter NAME`",
    "bridge": "`--bridge NAME`",
    "curriculum": '`[curriculum] use = "NAME"`',
    "engine": "`--engine NAME`",
    "environment": "`--env NAME`",
    "launcher": "`--launcher NAME`",
    "loss": '`[trainer] loss = "NAME"`',
    "reward": "`--reward NAME`",
    "sandbox": '`[environment.agent] sandbox = "NAME"`',
    "sink": "`[sink.NAME]`",
    "teacher": "`[teacher.NAME]`",
    "trainer": "`--trainer NAME`",
    "transform": "`[transform.NAME]`",
}


def folders() -> dict[str, tuple[str, str]]:
    """The folder and the description of each package, by its distribution."""
    found = {}
    for file in sorted(REPOSITORY.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        found[project["name"]] = (file.parent.name, project["description"].rstrip("."))
    return found


def page() -> str:
    packages, registry = folders(), load_plugins().registry
    parts = [HEAD]
    for kind in KINDS:
        parts += [
            f"## {kind}",
            "",
            f"Chosen by {CHOSEN_BY[kind]}.",
            "",
            "| name | what it is | package |",
            "|---|---|---|",
        ]
        for offer in registry.offers(kind):
            if offer.distribution in packages or offer.distribution == "atropos-core":
                summary = offer.provider.summary.rstrip(".")
                parts.append(f"| `{offer.provider.name}` | {cell(summary)} | {package(offer.distribution, packages)} |")
        parts.append("")
    parts += ["## Packages", "", "| package | what it adds |", "|---|---|"]
    parts += [f"| [{name}](../plugins/{folder}) | {cell(text)} |" for name, (folder, text) in packages.items()]
    return "\n".join(parts) + "\n"


def package(distribution: str, packages: dict[str, tuple[str, str]]) -> str:
    if distribution not in packages:
        return "`atropos-core`"
    return f"[{packages[distribution][0]}](../plugins/{packages[distribution][0]})"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
