"""`atropos completion`, and completion of values: components, run directories, keys of a run file."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VARIABLE = "_ATROPOS_COMPLETE"  # environment variable: set when the shell asks for a completion
BASH = f"""\
_atropos_completion() {{
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${{COMP_WORDS[*]}}" COMP_CWORD=$COMP_CWORD {VARIABLE}=complete_bash "$1" 2>/dev/null ) )
    [[ ${{#COMPREPLY[@]}} -gt 0 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}}
complete -o default -F _atropos_completion atropos"""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def add(app: typer.Typer) -> None:
    app.command("completion", rich_help_panel="Build")(completion)


def completion(shell: Annotated[Shell, typer.Argument(help="The shell: bash, zsh or fish.")]) -> None:
    """Print the script that completes commands, flags, components, run directories and keys of --set in a shell.

    [bold]Examples[/]

      atropos completion bash > ~/.local/share/bash-completion/completions/atropos

      atropos completion zsh > ~/.zfunc/_atropos     # with fpath+=~/.zfunc before compinit in ~/.zshrc

      atropos completion fish > ~/.config/fish/completions/atropos.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # typer.completion has it, and does not export it

    from atropos_core import console

    made = BASH if shell == "bash" else get_completion_script(prog_name="atropos", complete_var=VARIABLE, shell=shell)
    console.say(made)


def components(*kinds: str) -> Callable[[str], list[str]]:
    """Complete names of installed components of these kinds, or of all kinds."""

    def complete(incomplete: str) -> list[str]:
        from atropos_core.plugins.manager import load_plugins

        offers = load_plugins().registry.offers()
        names = {offer.provider.name for offer in offers if not kinds or offer.kind in kinds}
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


def runs(incomplete: str) -> list[str]:
    """Complete run directories below the typed path, the newest first; if no path was typed, those in runs/."""
    from pathlib import Path

    parent = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    found = [*_runs_in(parent), *(_runs_in(Path("runs")) if "/" not in incomplete else ())]
    newest = sorted(found, key=lambda directory: directory.stat().st_mtime, reverse=True)
    return [str(directory) for directory in newest if str(directory).startswith(incomplete)]


def _runs_in(parent: Path) -> Iterator[Path]:
    return (file.parent for file in parent.glob("*/config.toml"))


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete keys of the run file, and options of the named or default components, each with its `=`."""
    from atropos_core.config.option_descriptions import options_of
    from atropos_core.config.run_file import SINGLE, RunConfig
    from atropos_core.errors import AtroposError
    from atropos_core.plugins.manager import load_plugins

    usual: Any = RunConfig()
    names = [
        option.name for option in options_of(RunConfig) if "NAME" not in option.name
    ]  # names that the user chooses cannot be completed
    named = [(kind, kind, ctx.params.get(kind) or getattr(usual, kind).use) for kind in SINGLE]
    named += [("environment", f"environment.{name}", name) for name in ctx.params.get("env") or ()]
    registry = load_plugins().registry
    for kind, path, use in named:
        try:
            names += [f"{path}.{option.name}" for option in options_of(registry.find(kind, use).provider.options)]
        except AtroposError:
            continue  # not installed: the command itself says so
    return sorted({f"{name}=" for name in names if name.startswith(incomplete) and "[" not in name})
