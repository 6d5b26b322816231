"""The pages of this repository as one site: python -m tools.make_site FOLDER, then `mkdocs build --strict` on the mkdocs.yml there.
`make site` does both.

README.md is the first page; docs/, the plugins' READMEs, CHANGELOG.md and CONTRIBUTING.md follow as they are, with links between them
turned to where the pages lie in the site. llms.txt lists them with a phrase each, for programs that read. A file of code that a page
links to is copied next to the pages. The reference is made from the code: docstrings of what a plugin's author uses, and the options of
every component that is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SITE_NAME = "Atropos"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
MERMAID = re.compile(
    r"^```mermaid\n.*?^```\n", re.M | re.S
)  # drawn by a script from elsewhere: the text below it says the same
WORKER = Path(__file__).with_name("site") / "iframe-worker.js"
NAVIGATION: Mapping[str, tuple[str, ...]] = {
    "Start": (
        "index.md", "install.md", "recipes.md", "how-a-run-works.md", "cut-sampling.md", "commands.md", "multi-turn.md", "view.md",
        "python.md",
        "benchmarks.md", "glossary.md", "contents.md",
    ),
    "Tutorial": tuple(
        f"tutorial/{name}.md"
        for name in (
            "01-first-run",
            "02-look",
            "03-environment",
            "04-rewards",
            "05-turns",
            "06-run-files",
            "07-trainer",
            "08-resume",
            "09-processes",
            "10-package",
        )
    ),
    "A run": (
        "run-file.md", "models.md", "defaults.md", "sweeps.md", "warm-start.md", "my-rewards-are-all-0.md", "credit.md", "health.md",
        "reward-hacking.md", "records.md",
        "debugging.md",
        "export.md",
        "bridges.md", "gpu.md", "swaps.md",
    ),
    "Agents": ("agents.md", "agent-api.md", "agent-tokens.md", "agent-clients.md", "agent-sandboxes.md"),
    "More than one machine": ("launchers.md", "roles.md", "trajectory-api.md", "simulation.md"),
    "Third-party environments": ("catalogue.md",),
    "Third-party trainers": ("skyrl.md", "roll.md"),
    "Third-party scripts": ("tinker.md",),
    "Coming from": tuple(f"coming-from/{name}.md" for name in ("trl", "atroposlib", "verifiers", "skyrl", "roll")),
    "Plugins": ("plugins.md", "hooks.md", "where-things-are.md"),
}  # fmt: skip
INDEX = Path(
    "docs/README.md"
)  # the same pages for a reader of the repository, each with a phrase; a test holds it to NAVIGATION
INDEXED = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\): (.+)$", re.M)
MODULES = (
    "atropos_core.types", "atropos_core.conversation", "atropos_core.interfaces", "atropos_core.launchers",
    "atropos_core.plugins.services", "atropos_core.errors", "atropos_core.plugins.provider", "atropos_core.plugins.model_provider",
    "atropos_core.plugins.spec",
)  # fmt: skip


def sources() -> dict[Path, Path]:
    """Where each page lies in the repository, and in the site."""
    found = {
        Path("README.md"): Path("index.md"),
        Path("CHANGELOG.md"): Path("changelog.md"),
        Path("CONTRIBUTING.md"): Path("contributing.md"),
    }
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        found[page.relative_to(REPOSITORY)] = page.relative_to(REPOSITORY / "docs")
    if INDEX in found:
        found[INDEX] = Path("contents.md")  # beside index.md a README.md would be another first page
    for storey in ("libs", "plugins"):
        for page in sorted((REPOSITORY / storey).rglob("README.md")):
            inside = page.relative_to(REPOSITORY / storey).parent
            found[page.relative_to(REPOSITORY)] = Path(storey, "-".join(inside.parts)).with_suffix(".md")
    return found


class Site:
    def __init__(self, folder: Path) -> None:
        self.pages = folder / "pages"
        self._places = sources()
        self.written: set[Path] = set()

    def write(self, place: Path, text: str) -> None:
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.written.add(place)

    def copy_pages(self) -> None:
        for source, place in self._places.items():
            self.write(place, self._linked(source, place, MERMAID.sub("", (REPOSITORY / source).read_text())))
        for extra in [*(REPOSITORY / "docs").rglob("*.png"), *(REPOSITORY / "docs").rglob("*.ipynb")]:
            self._copy(extra.relative_to(REPOSITORY), extra.relative_to(REPOSITORY / "docs"))
        (self.pages / WORKER.name).write_bytes(WORKER.read_bytes())

    def _copy(self, source: Path, place: Path) -> None:
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((REPOSITORY / source).read_bytes())

    def _linked(self, source: Path, place: Path, text: str) -> str:
        """The text, with each link to a file of the repository turned to that file's place in the site."""

        def turned(match: re.Match[str]) -> str:
            image, label, target, anchor = match[1], match[2], match[3], match[4] or ""
            if not target or "://" in target or target.startswith("mailto:"):
                return match[0]
            wanted = Path(os.path.normpath(source.parent / target))
            if (REPOSITORY / wanted).is_dir():
                readme = wanted / "README.md"
                if readme not in self._places:
                    return f"{label} (`{wanted}` in the repository)"
                wanted = readme
            if not (REPOSITORY / wanted).is_file():
                sys.exit(f"{source} links to {target}, and there is no {wanted}.")
            to = self._places.get(wanted)
            if to is None:
                to = Path("files") / wanted
                self._copy(wanted, to)
            return f"{image}[{label}]({os.path.relpath(to, place.parent)}{anchor})"

        parts, last = [], 0
        for block in FENCED.finditer(text):
            parts += [LINK.sub(turned, text[last : block.start()]), block[0]]
            last = block.end()
        return "".join([*parts, LINK.sub(turned, text[last:])])

    def write_llms_txt(self, reference: list[Path]) -> None:
        """One line a page, for programs that read: https://llmstxt.org."""
        lines = [f"# {SITE_NAME}", "", f"> {_description()}"]
        index = (REPOSITORY / INDEX).read_text()
        for section in index.split("\n## ")[1:]:
            lines += ["", f"## {section.partition(chr(10))[0]}", ""]
            for title, target, phrase in INDEXED.findall(section):
                place = self._places[Path(os.path.normpath(INDEX.parent / target))]
                lines.append(f"- [{title}]({place.with_suffix('.html')}): {phrase}")
        lines += ["", "## Packages", ""]
        for place in sorted(place for place in self.written if place.parts[0] in ("libs", "plugins")):
            lines.append(
                f"- [{place.stem}]({place.with_suffix('.html')}): {_first_sentence((self.pages / place).read_text())}"
            )
        lines += ["", "## Reference", ""]
        lines += [f"- [{place.stem}]({place.with_suffix('.html')}): made from the code" for place in reference]
        (self.pages / "llms.txt").write_text("\n".join(lines) + "\n")

    def write_reference(self) -> list[Path]:
        made = []
        for module in MODULES:
            place = Path("reference") / f"{module.removeprefix('atropos_core.')}.md"
            self.write(place, f"# {module}\n\n::: {module}\n")
            made.append(place)
        place = Path("reference/options.md")
        self.write(place, options_page())
        return [*made, place]

    def navigation(self, reference: list[Path]) -> list[Any]:
        chosen = {Path(name) for names in NAVIGATION.values() for name in names}
        missing = chosen - self.written
        if missing:
            sys.exit(f"the navigation names pages that there are not: {', '.join(map(str, sorted(missing)))}")
        plugins = sorted(place for place in self.written if place.parts[0] in ("libs", "plugins"))
        decisions = sorted(place for place in self.written if place.parts[0] == "decisions")
        ends = [Path("changelog.md"), Path("contributing.md")]
        left = self.written - chosen - {*plugins, *decisions, *ends, *reference}
        if left:
            sys.exit(
                f"pages that are nowhere in the navigation of tools/make_site.py: {', '.join(map(str, sorted(left)))}"
            )
        menus: list[Any] = []
        for title, names in NAVIGATION.items():
            menus.append({title: [*names, *(map(str, plugins) if title == "Plugins" else ())]})
        return [
            *menus,
            {"Reference": [str(place) for place in reference]},
            {"Why": [str(place) for place in [*ends, *decisions]]},
        ]


def _description() -> str:
    said: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["description"]
    return said


def _first_sentence(page: str) -> str:
    """Of the first paragraph below the title, without its links."""
    paragraph = next(part for part in page.split("\n\n") if not part.startswith(("#", "```", "|", "<")))
    plain = re.sub(r"\s+", " ", LINK.sub(r"\2", paragraph)).strip()
    return re.split(r"(?<=\.)\s", plain)[0]


def options_page() -> str:
    """The options of every component that is installed here, by kind."""
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.plugins.offers import KINDS

    registry = load_plugins().registry
    lines = [
        "# Options of every component",
        "",
        "Made from the code. `atropos plugins NAME` shows the same of one component.",
        "",
    ]
    for kind in KINDS:
        for offer in registry.offers(kind):
            fields = offer.provider.options.model_fields
            lines += [
                f"## {kind} `{offer.provider.name}`",
                "",
                f"{offer.provider.summary}. From {offer.distribution}.",
                "",
            ]
            if fields:
                lines += ["| option | default | |", "|---|---|---|"]
            for name, field in fields.items():
                default = (
                    "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
                )
                lines.append(f"| `{name}` | {_cell(default)} | {_cell(field.description or '')} |")
            lines.append("")
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("``", "").replace("|", "\\|").replace("\n", " ")


def settings(navigation: list[Any]) -> str:
    import json

    said = {
        "site_name": SITE_NAME,
        "site_description": _description(),
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,  # so that the pages open from a folder as well
        "extra": {"polyfills": [WORKER.name]},
        "theme": {
            "name": "material",
            "font": False,  # nothing from elsewhere
            "features": ["navigation.sections", "navigation.indexes", "content.code.copy", "search.suggest", "toc.follow"],
            "palette": [
                {"media": f"(prefers-color-scheme: {when})", "scheme": scheme, "toggle": {"icon": icon, "name": "the other colours"}}
                for when, scheme, icon in (
                    ("light", "default", "material/weather-night"), ("dark", "slate", "material/weather-sunny"),
                )
            ],
        },
        "plugins": [
            "search",
            "offline",  # the search's index as a script, which a page from a folder may load
            {
                "mkdocstrings": {
                    "handlers": {
                        "python": {
                            "paths": [str(REPOSITORY)],
                            "options": {
                                "show_root_toc_entry": False, "show_source": False, "members_order": "source", "heading_level": 2,
                                "show_if_no_docstring": False, "separate_signature": True, "show_signature_annotations": True,
                            },
                        }
                    }
                }
            },
        ],
        "markdown_extensions": ["tables", "admonition", "pymdownx.highlight", "pymdownx.superfences", {"toc": {"permalink": True}}],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
        },
        "not_in_nav": "/files/",
        "nav": navigation,
    }  # fmt: skip
    return json.dumps(said, indent=1)  # which is YAML too


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.make_site", description="Gather the pages of the site.")
    parser.add_argument("folder", type=Path, help="an empty folder; mkdocs.yml and pages/ go there")
    folder: Path = parser.parse_args(arguments).folder.resolve()
    if folder.is_dir() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty: pages of before would stay in the site. Give an empty folder.")
    site = Site(folder)
    site.copy_pages()
    reference = site.write_reference()
    (folder / "mkdocs.yml").write_text(settings(site.navigation(reference)))
    site.write_llms_txt(reference)


if __name__ == "__main__":
    main(sys.argv[1:])
