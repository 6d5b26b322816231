"""Flags that several commands share, and the configuration that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import components, settings

if TYPE_CHECKING:
    from atropos_core.config.run_file import Layer, Loaded
    from atropos_core.plugins.manager import Plugins
    from atropos_core.plugins.provider import ResolvedModel

FileArgument = Annotated[
    Path | None,
    typer.Argument(
        help="A run file (TOML), or recipe:NAME (`atropos recipes`). Flags override it.", show_default=False
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        help="Environment: a name, pkg.mod:Class or ./file.py:Class. May be repeated.",
        autocompletion=components("environment"),
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help='Model: "tiny", a directory, or a Hugging Face id. \\[default: tiny]')
]
BridgeOption = Annotated[
    str | None,
    typer.Option(
        help="The bridge, which moves weights to the engine. \\[default: ipc]", autocompletion=components("bridge")
    ),
]
EngineOption = Annotated[
    str | None, typer.Option(help="The engine, which samples. \\[default: hf]", autocompletion=components("engine"))
]
TrainerOption = Annotated[
    str | None, typer.Option(help="The trainer. \\[default: grpo]", autocompletion=components("trainer"))
]
LauncherOption = Annotated[
    str | None,
    typer.Option(help="Starts the processes of a run. \\[default: local]", autocompletion=components("launcher")),
]
RewardOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help="Reward, added to the environment's own score. May be repeated.",
        autocompletion=components("reward"),
    ),
]
StepsOption = Annotated[int | None, typer.Option(help="Training steps.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of all random numbers of the run.")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Same seed, same weights, also after a kill and a resume (CPU).")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Any value of the run file: --set trainer.learning_rate=1e-6",
        autocompletion=settings,
    ),
]


def retired(before: str, now: str) -> Any:
    """Return an option for an old name: it is refused, and the error gives the new name."""

    def refuse(value: str | None) -> None:
        from atropos_core.errors import ConfigError

        if value is not None:
            raise ConfigError(f"{before} is called {now} now.", remedy=f"Give {now} {value}")

    return typer.Option(before, hidden=True, callback=refuse)


@dataclass(frozen=True)
class Uses:
    """The sections and values of a run file that a command reads, by path."""

    command: str
    paths: tuple[str, ...]

    def has(self, path: str) -> bool:
        if path.startswith("engine.replica"):  # only a run that trains has more than one
            return False
        return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in self.paths)


ROLLOUT_SECTIONS = ("model", "date", "seed", "deterministic", "environment", "reward", "engine", "sampling", "watch")


def configure(
    file: Path | None = None,
    *,
    saved: Path | None = None,
    env: Sequence[str] | None = None,
    model: str | None = None,
    bridge: str | None = None,
    engine: str | None = None,
    trainer: str | None = None,
    reward: Sequence[str] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    deterministic: bool = False,
    changes: Sequence[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    uses: Uses | None = None,
    download: bool = True,
    weights: bool = True,
    preset: bool = True,
) -> tuple[Loaded, ResolvedModel, Plugins]:
    """Merge defaults, rules that follow the model, what the trainer works with, the model's preset, the file and flags, each
    overriding the one before.

    `saved`: a run's directory, whose saved file lists all components. `flags`: values of flags that only this command has, by
    path. `uses`: the sections that the command reads, if not all. Without `download`, a model of the hub is not fetched; without
    `weights`, only its configuration is. Without `preset`, rules and the model's recommended values are ignored. A model with a
    preset has no rules. Raises ConfigError for a --set that this command does not read: a run file may serve several commands, but
    a flag is only for this one."""
    from atropos_core.config import run_file as config
    from atropos_core.config.rules import RULE, follow_model, follow_trainer
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins

    pairs: list[tuple[str, Any]] = []
    single = {
        "model": model,
        "training.steps": steps,
        "seed": seed,
        "bridge.use": bridge,
        "engine.use": engine,
        "trainer.use": trainer,
        **(flags or {}),
    }
    pairs += [(path, value) for path, value in single.items() if value is not None]
    pairs += [("deterministic", True)] if deterministic else []
    changed = [config.parse_flag(change) for change in changes or ()]
    _refuse_idle(changed, {path for path, _ in pairs}, uses)
    given = config.nest(pairs)
    plugins = load_plugins()
    layers = [read_run_file(file, plugins)] if file is not None else []
    if saved is not None:
        layers = [_saved(saved / "config.toml")]
    for section, named in (("environment", env), ("reward", reward)):
        if named:
            known = {
                name for layer in layers for name in layer.values.get(section, {})
            }  # of the file: its `use` stands
            tables: dict[str, Any] = {short_name(name): {} if name in known else {"use": name} for name in named}
            if len(tables) < len(named):
                raise ConfigError(
                    f"two of {', '.join(named)} have the same short name.", remedy="Name them apart in a run file."
                )
            _overlay(tables, given.get(section, {}))
            given[section] = tables
    _overlay(given, config.nest(changed))
    if env:  # of a file's environments, those that the flag names
        layers = [_only(layer, "environment", given["environment"]) for layer in layers]
    reference = next(
        (layer["model"] for layer in (given, *(entry.values for entry in layers)) if "model" in layer), None
    )
    if reference == "":
        raise ConfigError(
            "the model's name is empty.", remedy="Name one, as --model tiny; is a variable of the shell not set?"
        )
    resolved = plugins.resolve_model(str(reference or config.RunConfig().model), download=download, weights=weights)
    if preset:
        layers.insert(0, config.Layer(f"preset of model {reference or config.RunConfig().model!r}", resolved.preset))
    layers.append(config.Layer(config.FLAG, config.anchored(given, Path())))
    layers = [_with_model(layer) for layer in layers]
    loaded = config.load(layers)
    if saved is None and (with_trainer := follow_trainer(loaded.config, plugins.registry)):
        layers.insert(0, config.Layer(f"trainer {loaded.config.trainer.use!r}", with_trainer))
        loaded = config.load(layers)
    if preset and not resolved.preset and saved is None:
        rules = config.Layer(RULE, follow_model(loaded.config, resolved.directory, plugins.registry))
        loaded = config.load([rules, *layers])
        used = {path: value for path, value, origin in loaded.rows() if origin == RULE}
        resolved = replace(resolved, rules=used)
    return loaded, resolved, plugins


def read_run_file(file: Path, plugins: Plugins) -> Layer:
    """Read a run file, or the one that a plugin has under this name, as recipe:NAME. Raises ConfigError."""
    from atropos_core.config.run_file import read_file

    return replace(read_file(plugins.run_file(file)), origin=str(file))


def _saved(path: Path) -> Layer:
    """Read a run's saved file. Raises RunDirectoryError if it is incomplete, because defaults would replace what is missing."""
    from atropos_core.config.run_file import read_file
    from atropos_core.errors import RunDirectoryError

    layer = read_file(path)
    if missing := [name for name in ("model", "engine", "trainer", "bridge") if name not in layer.values]:
        raise RunDirectoryError(
            f"{path} is not what the run wrote: it has no {missing[0]}.",
            remedy="Bring the file back, or start a new run from a run file of yours.",
        )
    return replace(layer, whole=True)


def _refuse_idle(changed: Sequence[tuple[str, Any]], flags: set[str], uses: Uses | None) -> None:
    from atropos_core.errors import ConfigError

    for path, _ in changed:
        if path in flags:
            raise ConfigError(
                f"{path} is given twice: by a flag of its own and by --set.", remedy="Leave one of them out."
            )
        if uses is not None and not uses.has(path):
            raise ConfigError(
                f"--set {path} has no effect on `{uses.command}`, which uses {', '.join(uses.paths)}.",
                remedy="Leave it out. In a run file it may stay, for the other commands that read the file.",
            )


def short_name(reference: str) -> str:
    """Return a component's name for metrics and file names: without the suffix of a code or data file."""
    from atropos_core.plugins.offers import FILES_OF_ROWS

    *_, name = reference.split(":")
    path = Path(name)
    name = path.stem if path.suffix in (".py", *FILES_OF_ROWS) else path.name
    return re.sub(r"[^\w-]+", "_", name).lower()  # or `--set environment.NAME.OPTION` could not name it


def _with_model(layer: Layer) -> Layer:
    """Return the layer with an absolute path of the model, so that it still holds when the run is resumed elsewhere."""
    model = layer.values.get("model")
    if not isinstance(model, str):
        return layer
    path = Path(model).expanduser()
    if not (path.is_dir() or (path.suffix.lower() == ".gguf" and path.is_file())):
        return layer
    return replace(layer, values={**layer.values, "model": str(path.resolve())})


def _only(layer: Layer, section: str, named: Mapping[str, Any]) -> Layer:
    """Return the layer with only the named components of `section`."""
    if section not in layer.values:
        return layer
    kept = {name: value for name, value in layer.values[section].items() if name in named}
    return replace(layer, values={**layer.values, section: kept})


def _overlay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(under.get(key), dict):
            _overlay(under[key], value)
        else:
            under[key] = value
