"""`atropos import`."""

from __future__ import annotations

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
    """Return the line or lines of an option, as `ruff format` would write them."""
    said = _quoted(one.description or f"As {made.name} has it.")
    opening = f"    {one.name}: {one.annotation} = Field("
    whole = f"default={_python(one.default)}, description={said}"
    if len(opening) + len(whole) < LINE:
        return f"{opening}{whole})"
    if len(whole) + 8 <= LINE and "\n" not in whole:
        return f"{opening}\n        {whole}\n    )"
    default = f"default={_python(one.default)}"
    if len(default) + 9 > LINE:
        default = f"default={_python(one.default, ' ' * 8)}"
    return f"{opening}\n        {default},\n        description={said},\n    )"


def _python(value: object, indent: str | None = None) -> str:
    """Return a literal as Python. With an indent, each element of a list, tuple, set or dict has a line, and longer ones several."""
    if isinstance(value, str):
        return _quoted(value)
    if not isinstance(value, list | tuple | set | dict) or not value:
        return repr(value)
    opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")") if isinstance(value, tuple) else ("{", "}")
    pairs = value.items() if isinstance(value, dict) else [(None, one) for one in value]
    keys = [f"{_python(key)}: " if isinstance(value, dict) else "" for key, _ in pairs]
    flat = [key + _python(one) for key, (_, one) in zip(keys, pairs, strict=True)]
    if indent is None:
        return f"{opening}{', '.join(flat)}{',' if isinstance(value, tuple) and len(value) == 1 else ''}{closing}"
    inner = f"{indent}    "
    lines = [
        text if len(inner) + len(text) < LINE else key + _python(one, inner)
        for text, key, (_, one) in zip(flat, keys, pairs, strict=True)
    ]
    return "\n".join([opening, *(f"{inner}{line}," for line in lines), f"{indent}{closing}"])


def _quoted(text: str) -> str:
    """Return a string as Python, in the quotes that need fewer escapes, double ones if both need as many."""
    quote = '"' if text.count('"') <= text.count("'") else "'"
    return quote + f"\\{quote}".join(repr(part)[1:-1] for part in text.split(quote)) + quote


def _comment(text: str, indent: int) -> str:
    before = " " * indent
    return "\n".join(f"{before}# {line}".rstrip() for line in text.splitlines())
