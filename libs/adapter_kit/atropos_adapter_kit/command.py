"""`atropos adapter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.options import (
    EnvOption,
    ModelOption,
    RewardOption,
    SeedOption,
    SetOption,
    StepsOption,
    Uses,
    configure,
)

if TYPE_CHECKING:
    from atropos_core.interfaces import Adapter
    from atropos_core.plugins.manager import Plugins

KNOWN = ("atropos-plugin-adapter-skyrl", "atropos-plugin-adapter-roll")
USES = Uses(
    "atropos adapter",  # settings that the other framework has no equivalent for are not passed on
    ("model", "seed", "environment", "reward", "sampling", "evaluation", "training", "transform", "checkpoint", "trainer.learning_rate"),
)  # fmt: skip


def add(app: typer.Typer) -> None:
    app.command("adapter", rich_help_panel="Connect")(adapter)


def adapter(
    name: Annotated[str, typer.Argument(help='An adapter, or "list".')],
    file: Annotated[
        str | None, typer.Argument(help='A run file (TOML); flags override it. Or "doctor".', show_default=False)
    ] = None,
    env: EnvOption = None,
    model: ModelOption = None,
    reward: RewardOption = None,
    steps: StepsOption = None,
    seed: SeedOption = None,
    changes: SetOption = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="An option of the adapter itself; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write configuration and launch script into this new or empty folder.")
    ] = None,
) -> None:
    """Run our environments in another framework: write its configuration and launch script, or check that it works here.

    [bold]Examples[/]

      atropos adapter list

      atropos adapter skyrl --env gsm8k --out skyrl-gsm8k

      atropos adapter skyrl my-run.toml --out skyrl-mine --set training.group_size=16

      atropos adapter skyrl doctor
    """
    from atropos_core.errors import ConfigError
    from atropos_core.plugins.manager import load_plugins

    of_a_run = {"--env": env, "--reward": reward, "--steps": steps, "--seed": seed, "--set": changes, "--out": out}
    if name == "list":
        _takes_no("list", {"FILE": file, **of_a_run, "--model": model, "--option": option}, "Leave it out.")
        _list(load_plugins())
    elif file == "doctor":
        remedy = "Leave it out: the doctor takes --model, and the adapter's own options by --option."
        _takes_no(f"{name} doctor", of_a_run, remedy)
        _doctor(name, model or "toy", option or ())
    elif out is None:
        raise ConfigError(
            f"`atropos adapter {name}` needs to know where to write.",
            remedy=f"atropos adapter {name} --env gsm8k --out DIR, or: atropos adapter {name} doctor",
        )
    else:
        run = {"env": env, "model": model, "reward": reward, "steps": steps, "seed": seed, "changes": changes}
        _export(name, None if file is None else Path(file), out, option or (), run)


def _takes_no(command: str, given: Mapping[str, Any], remedy: str) -> None:
    from atropos_core.errors import ConfigError

    if named := [flag for flag, value in given.items() if value not in (None, [])]:
        raise ConfigError(f"`atropos adapter {command}` does not take {', '.join(named)}.", remedy=remedy)


def _list(plugins: Plugins) -> None:
    from atropos_core import console

    offers = plugins.registry.offers("adapter")
    if offers:
        rows = [(offer.provider.name, offer.provider.summary, offer.distribution) for offer in offers]
        console.table(("adapter", "what it is", "from"), rows)
    else:
        console.say(_nothing())
    for report in plugins.broken():
        console.broken(f"{report.name} ({report.distribution} {report.version}); `atropos plugins` says why")


def _nothing() -> str:
    return f"No adapter is installed. These packages offer one: {', '.join(KNOWN)}."


def _doctor(name: str, model: str, options: Sequence[str]) -> None:
    """Print what the adapter finds. Exit with 1 if something is broken."""
    from atropos_core import console
    from atropos_core.plugins.manager import load_plugins
    from atropos_core.storage.tempdirs import owned_directory

    plugins = load_plugins()
    _known(plugins, name)
    with owned_directory("adapter") as directory:
        made = _build(plugins, name, options, directory, plugins.resolve_model(model).directory)
        console.facts(sorted(made.versions().items()))
        findings = made.doctor()
    console.findings(findings)
    if broken := [finding for finding in findings if finding.ok is False]:
        console.say(f"{len(broken)} of {len(findings)} are broken; each comes with what to do.")
        raise typer.Exit(1)
    console.say("nothing is broken.")


def _export(name: str, file: Path | None, out: Path, options: Sequence[str], run: dict[str, Any]) -> None:
    from atropos_core import console
    from atropos_core.config.resolve import resolve_component
    from atropos_core.errors import ConfigError, RunDirectoryError
    from atropos_core.launch.fit import refuse_second_advantages
    from atropos_core.launch.plan import make_plan
    from atropos_core.plugins.manager import load_plugins

    _known(load_plugins(), name)
    loaded, resolved, plugins = configure(file, **run, uses=USES, download=False)
    if loaded.config.warmup is not None:
        raise ConfigError(
            "[warmup] is not carried over to another framework, whose run would begin without it.",
            remedy="Run only the warm start here, with training.steps = 0, `atropos export` its policy, and start from that.",
        )
    make_plan(loaded.config, resolved, plugins, training=False, sampling=False)  # every name and option is there
    transforms = loaded.config.transform.items()
    refuse_second_advantages(
        {name: resolve_component(plugins.registry, "transform", f"transform.{name}", one) for name, one in transforms}
    )
    made = _build(plugins, name, options, out, resolved.directory)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{out} cannot be made: {error.strerror}.", remedy="Name another folder.") from error
    if any(out.iterdir()):
        raise RunDirectoryError(f"{out} is not empty.", remedy="Name a new folder, or empty it.")
    for path in made.export(loaded.config, out):
        console.say(str(path))


def _known(plugins: Plugins, name: str) -> None:
    """Raises UnknownComponent, with the packages that offer adapters, if this one is not installed."""
    from atropos_core.errors import UnknownComponent

    try:
        plugins.registry.find("adapter", name)
    except UnknownComponent as error:
        if plugins.registry.offers("adapter"):
            raise
        raise UnknownComponent(
            f"there is no adapter named {name!r}. {_nothing()}",
            remedy=next((f"pip install {one}" for one in KNOWN if one.endswith(f"-{name}")), f"pip install {KNOWN[0]}"),
        ) from error


def _build(plugins: Plugins, name: str, options: Sequence[str], directory: Path, model: Path) -> Adapter:
    from atropos_core.config.component import Component
    from atropos_core.config.resolve import resolve_component
    from atropos_core.config.run_file import nest, parse_flag
    from atropos_core.plugins.provider import RunContext

    values = nest(parse_flag(one) for one in options)
    component = resolve_component(plugins.registry, "adapter", "--option", Component(**{**values, "use": name}))
    made: Adapter = component.build(RunContext(directory=directory, model=model))
    return made
