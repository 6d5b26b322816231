"""`atropos import`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atropos_env_atroposlib.importing.source import ConfigField, Read

TEMPLATES = Path(__file__).parent / "templates"
LINE = 120
HERE = {  # the place for the bodies of their methods
    "open": ("__init__", "setup"),
    "rows": ("get_next_item",),
    "score": ("collect_trajectories", "collect_trajectory", "postprocess_histories"),
}
NOT_HERE = {
    "evaluate": "the held-out split, which the run evaluates",
    "wandb_log": "Score.parts and Score.metrics, which the run records",
    "add_rollouts_for_wandb": "the run records all rollouts",
    "create_rollout_table": "the run records all rollouts",
    "save_checkpoint": "the run saves which tasks were drawn",
    "load_checkpoint": "the run saves which tasks were drawn",
}


def add(app: typer.Typer) -> None:
    app.command("import", rich_help_panel="Build")(import_)


def import_(
    file: Annotated[str, typer.Argument(help="path.py, or path.py:Class if it has several.", show_default=False)],
    name: Annotated[
        str | None, typer.Argument(help="Name that users type. \\[default: from the class]", show_default=False)
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Folder in which to make the plugin's folder.")] = Path("."),
) -> None:
    """Convert a file that was written for atroposlib to an Atropos environment: a skeleton, its options, and where to move what.

    The file is read but not run. To train on it unchanged: atropos run --env atroposlib:path.py

    [bold]Examples[/]

      atropos import gsm8k_server.py

      atropos import gsm8k_server.py:GSM8kEnv grade_school --dir plugins
    """
    from atropos_core import console
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins
    from atropos_env_atroposlib.importing.source import read
    from atropos_testing.new_command import check_name, write

    path, _, wanted = file.rpartition(":") if ":" in file and not file.endswith(".py") else (file, "", "")
    if not path.endswith(".py"):
        raise ConfigError(f"{file} is not a Python file.", remedy="Name one: path.py, or path.py:Class.")
    made = read(Path(path), wanted)
    name = name or _name(made.name)
    check_name("environment", name, load_plugins().registry)
    folder = write("environment", name, directory, over=TEMPLATES, words=_words(made))
    console.say(f"made {folder}: a skeleton of the environment {name!r}, from {made.name} in {path}")
    console.say(f"with {len(made.fields)} options: {', '.join(one.name for one in made.fields) or 'none'}")
    for line in _left(made):
        console.warn(f"not carried over: {line}")
    console.say("next: write `rows` (the tasks) and `score` (the old bodies are there as comments), and then")
    console.say(f"  pip install -e {console.quoted(folder)}")
    console.say(f"  atropos check {name} --kind environment")
    console.say(f"  python -m pytest {console.quoted(folder)}")


def _name(cls: str) -> str:
    """GSM8kEnv: gsm8k."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", cls.removesuffix("Environment").removesuffix("Env") or cls)
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _left(made: Read) -> list[str]:
    known = {"config_init", *(name for names in HERE.values() for name in names)}
    lines = [f"{name}(): {NOT_HERE[name]}" for name in made.methods if name in NOT_HERE]
    lines += [f"{name}(), which others call" for name in made.methods if name not in known | NOT_HERE.keys()]
    return [*lines, *made.left]


def _words(made: Read) -> dict[str, str]:
    options = "\n".join(_option(one, made) for one in made.fields)
    words = {
        "does": f"{made.name} of {made.file.name}",
        "options": options or '    """None yet."""',
        "imports": "from pydantic import Field\n" if options else "",
        "typing": "".join(
            f", {word}"
            for word in ("Any", "Literal")
            if re.search(rf"\b{word}\b", " ".join(o.annotation for o in made.fields))
        ),
        "source": made.name,
    }
    words["typing"] = f"from typing import {words['typing'][2:]}\n\n" if words["typing"] else ""
    for place, names in HERE.items():
        parts = [f"{name} of {made.file.name}:\n\n{made.methods[name]}" for name in names if name in made.methods]
        words[f"old_{place}"] = _comment("\n\n".join(parts) or f"{made.name} has no {' or '.join(names)}.", 8)
    return words


def _option(one: ConfigField, made: Read) -> str:
    said = json.dumps(one.description or f"As {made.name} has it.", ensure_ascii=False)
    line = f"    {one.name}: {one.annotation} = Field({one.default}, description={said})"
    if len(line) <= LINE:
        return line
    return f"    {one.name}: {one.annotation} = Field(\n        {one.default},\n        description={said},\n    )"


def _comment(text: str, indent: int) -> str:
    before = " " * indent
    return "\n".join(f"{before}# {line}".rstrip() for line in text.splitlines())
