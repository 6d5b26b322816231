"""`atropos new`."""

from __future__ import annotations

import difflib
import importlib.util
import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atropos_core.plugins.registry import Registry

TEMPLATES = Path(__file__).parent / "templates"
MAX_NAME = 36  # letters; with more, lines of the templates would be longer than their pyproject.toml allows


@dataclass(frozen=True)
class Kind:
    """Names of a plugin of one kind, and a description of its example."""

    prefix: str
    does: str
    run: str  # a command that uses it
    needs: tuple[str, ...] = ()  # distributions, besides core and numpy


KINDS = {
    "environment": Kind("env", "numbers to be written backwards", "atropos run --model toy --env {name} --steps 20"),
    "reward": Kind(
        "reward",
        "the share of different words in a reply",
        "atropos run --env gsm8k --reward {name}",
    ),
    "transform": Kind(
        "transform",
        "reward less the group's mean, cut off at a limit",
        "atropos run --env gsm8k --set transform.{name}.use={name}",
    ),
    "curriculum": Kind(
        "curriculum",
        "tasks in the data's order, each some times in a row",
        "atropos run --env gsm8k --set curriculum.use={name}",
    ),
    "sink": Kind(
        "sink",
        "a table of the metrics, one line a step",
        "atropos run --env gsm8k --set sink.{name}.use={name}",
    ),
    "teacher": Kind(
        "teacher",
        "trust in the tokens of correct episodes",
        "atropos run --env gsm8k --set teacher.{name}.use={name} --set trainer.distillation.alone=true",
    ),
    "engine": Kind(
        "engine",
        "a table of next-token logits in numpy",
        "atropos run --model toy --engine {name} --env ./file.py:Class --steps 20",
    ),
    "trainer": Kind(
        "trainer",
        "REINFORCE on a table of next-token logits",
        "atropos run --model toy --trainer {name} --env ./file.py:Class --steps 20",
    ),
    "loss": Kind(
        "loss",
        "a clip without an edge",
        "atropos run --env gsm8k --set trainer.loss={name}",
        ("atropos-plugin-trainer-grpo",),
    ),
    "bridge": Kind(
        "bridge",
        "copies weights within one process",
        "atropos run --model toy --bridge {name} --env ./file.py:Class --steps 20",
    ),
    "adapter": Kind(
        "adapter", "tasks as JSON lines", "atropos adapter {name} --env gsm8k --out tasks", ("atropos-adapter-kit",)
    ),
    "sandbox": Kind(
        "sandbox",
        "programs started by a command of your own",
        "atropos run agent.toml --set environment.agent.sandbox.use={name}",
        ("atropos-plugin-agent-api",),
    ),
    "launcher": Kind(
        "launcher",
        "processes started by a command of your own, such as ssh",
        "atropos run --env gsm8k --bridge checkpoint --launcher {name}",
    ),
}
ALL_KINDS = ", ".join(KINDS)
WITH_TOOLS = Kind(
    "env",
    "word problems with a calculator, in several turns",
    "atropos run --model tiny-tools --env {name} --steps 20",
)


def add(app: typer.Typer) -> None:
    app.command("new", rich_help_panel="Build")(new)


def new(
    kind: Annotated[str, typer.Argument(help=f"One of {ALL_KINDS}.", show_default=False)],
    name: Annotated[
        str, typer.Argument(help="The name that users will type: lower case, as in word_count.", show_default=False)
    ],
    tools: Annotated[
        bool, typer.Option("--tools", help="An environment of several turns, in which the policy calls a tool.")
    ] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="The directory in which to make the plugin's folder.")
    ] = Path("."),
) -> None:
    """Make a plugin: a small working component with its package, README and contract test.

    [bold]Examples[/]

      atropos new environment word_count

      atropos new environment shop --tools

      atropos new reward politeness --dir plugins
    """
    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins

    check_name(kind, name, load_plugins().registry)
    if tools and kind != "environment":
        raise ConfigError(f"--tools has no effect on a {kind}: it is of an environment.", remedy="Leave --tools out.")
    folder = write(kind, name, directory, tools=tools)
    console.say(f"made {folder}: the {kind} {name!r}, which {KINDS[kind].prefix}_{name} offers")
    console.say("next:")
    place = folder if folder.is_absolute() else f"./{folder}"  # pip would look for a bare name with [test] in its index
    console.say(f"  pip install -e {console.quoted(f'{place}[test]')}")
    console.say(f"  atropos check {name} --kind {kind}")
    console.say(f"  python -m pytest {console.quoted(folder)}")
    console.say(f"  {_example(kind, tools).run.format(name=name)}")
    if tools:
        console.say(
            "`tiny-tools` knows the scaffold's calculator and no other tool: for tools of your own, name a model that was trained to call "
            "tools by its chat template, as `atropos run --model DIRECTORY` (Qwen/Qwen2.5-0.5B-Instruct is a small one)."
        )


def check_name(kind: str, name: str, registry: Registry) -> None:
    """Raise ConfigError if a plugin of that kind and name cannot be made here."""
    from atropos_core.errors import ConfigError

    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(KINDS)}."
        raise ConfigError(f"`atropos new` makes no {kind!r}. {hint}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > MAX_NAME or keyword.iskeyword(name):
        better = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:MAX_NAME].strip("_")
        usable = better and better != name and not keyword.iskeyword(better)
        raise ConfigError(
            f"{name!r} cannot be a plugin's name: it wants lower-case letters, digits and single underscores, "
            f"a letter first, at most {MAX_NAME}, and no word of Python's own.",
            remedy=f"atropos new {kind} {better}" if usable else None,
        )
    taken = [offer.distribution for offer in registry.offers(kind) if offer.provider.name == name]
    words = _words(kind, name)
    if taken:
        raise ConfigError(
            f"there is {'an' if kind[0] in 'ae' else 'a'} {kind} named {name!r} already, from {taken[0]}.",
            remedy="Choose another name.",
        )
    if _installed(words["distribution"]) or importlib.util.find_spec(words["package"]) is not None:
        raise ConfigError(
            f"{words['distribution']} is installed already, though it offers no {kind} {name!r}.",
            remedy=f"Choose another name, or pip uninstall {words['distribution']}.",
        )


def render(
    kind: str, name: str, *, tools: bool = False, over: Path | None = None, words: Mapping[str, str] | None = None
) -> dict[Path, str]:
    """Return the files of a new plugin, by their path in its folder. `tools`: an environment of several turns. `over`: a folder of
    templates that replace those of the kind; `words`: values that replace those derived from the name."""
    words = {**_words(kind, name, tools), **(words or {})}
    files = {}
    own = over or (TEMPLATES / "environment_tools" if tools else None)
    for root in (TEMPLATES / "common", TEMPLATES / kind, *([own] if own else [])):
        for source in sorted(root.rglob("*.tmpl")):
            path = source.relative_to(root).with_suffix("")
            parts = [words["package"] if part == "package" else part for part in path.parts]
            target = Path(*parts[:-1], ".gitignore" if parts[-1] == "gitignore" else parts[-1])
            files[target] = Template(source.read_text(encoding="utf-8")).substitute(words)
    return files


def write(
    kind: str,
    name: str,
    directory: Path,
    *,
    tools: bool = False,
    over: Path | None = None,
    words: Mapping[str, str] | None = None,
) -> Path:
    """Make the plugin's folder in `directory`, from what `render` returns. Raises ConfigError if something is in the way."""
    from atropos_core.errors import ConfigError

    folder = directory / _words(kind, name)["folder"]
    if folder.exists():
        raise ConfigError(f"{folder} exists already.", remedy="Choose another name, or another place with --dir.")
    try:
        for path, text in render(kind, name, tools=tools, over=over, words=words).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}.", remedy="Choose another place with --dir."
        ) from error
    return folder


def _example(kind: str, tools: bool) -> Kind:
    return WITH_TOOLS if tools else KINDS[kind]


def _words(kind: str, name: str, tools: bool = False) -> dict[str, str]:
    """Derive every name from one: folder, distribution, package, entry point."""
    from atropos_core.plugins.provider import Provider

    folder = f"{KINDS[kind].prefix}_{name}"
    return {
        "kind": kind,
        "name": name,
        "folder": folder,
        "distribution": f"atropos-plugin-{folder.replace('_', '-')}",
        "package": f"atropos_{folder}",
        "class_name": "".join(part.capitalize() for part in name.split("_")),
        "module": kind,
        "does": _example(kind, tools).does,
        "run": _example(kind, tools).run.format(name=name),
        "core_api": Provider.core_api,
        "needs": "".join(f', "{distribution}{Provider.core_api}"' for distribution in KINDS[kind].needs),
    }


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
