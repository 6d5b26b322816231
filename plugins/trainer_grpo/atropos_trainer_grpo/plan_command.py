"""`atropos plan`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.options import (
    BridgeOption,
    EngineOption,
    FileArgument,
    ModelOption,
    SetOption,
    configure,
)

if TYPE_CHECKING:
    from atropos_trainer_grpo.plan_search import Fitted, Fitting


MOST_GIGABYTES = 100_000


def add(app: typer.Typer) -> None:
    app.command("plan", rich_help_panel="Train")(plan)


def plan(
    file: FileArgument = None,
    model: ModelOption = None,
    bridge: BridgeOption = None,
    engine: EngineOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Plan for one card with this memory, here or not. 24 is a card sold as 24 GB, which has 24 GiB (25.8 GB); "
            "24GB and 24GiB are exactly that.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory next to that card, for what is offloaded; read as --gpu is. \\[default: as here]",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt and its reply. \\[default: as the run file has it]")
    ] = None,
    changes: SetOption = None,
) -> None:
    """Say what context and batch fit on this device, or on another one, for each way to train a model, and which to take.

    Nothing is loaded: the plan is that of `atropos run --dry-run`, searched for what still fits.

    [bold]Examples[/]

      atropos plan --model tiny

      atropos plan --model ./my-model --gpu 24 --context 8192

      atropos plan my-run.toml --gpu 80 --host 256
    """
    from atropos_core import console
    from atropos_core.console.waits import waiting
    from atropos_core.errors import ConfigError, FitError
    from atropos_core.launch.machine_memory import available_bytes
    from atropos_core.launch.model_checks import refuse_adapter
    from atropos_core.models.model_size import read
    from atropos_core.plugins.model_provider import PROMPT_TOKENS
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.layouts import layout_of
    from atropos_trainer_grpo.plan_search import Fitting, best

    if context is not None and context <= PROMPT_TOKENS:
        raise ConfigError(
            f"--context {context} leaves no room for a reply: plans count a prompt of {PROMPT_TOKENS} tokens.",
            remedy=f"Name more than {PROMPT_TOKENS}.",
        )
    devices = ["cuda:0"] if gpu is not None else None
    flags = {
        "engine.devices": devices,
        "trainer.devices": devices,
        "sampling.max_tokens": None if context is None else context - PROMPT_TOKENS,
    }
    loaded, resolved, plugins = configure(
        file, model=model, bridge=bridge, engine=engine, changes=changes, flags=flags, weights=False
    )
    if loaded.config.trainer.use != "grpo":
        raise ConfigError(
            f"atropos plan knows the ways of trainer 'grpo', and this run has {loaded.config.trainer.use!r}.",
            remedy="`atropos run --dry-run` prints the plan of any run.",
        )
    refuse_adapter(resolved.directory)
    if (size := read(resolved.directory)) is None:
        raise ConfigError(
            f"{resolved.directory} does not say how large its model is: it needs config.json, and safetensors or a usual architecture.",
            remedy="Name the directory of a Hugging Face model.",
        )
    available = dict(available_bytes())
    if gpu is not None:
        available["cuda:0"] = memory_bytes("--gpu", gpu)
    if host is not None:
        available["cpu"] = memory_bytes("--host", host)
    own = bridge is not None or any(change.startswith("bridge.use") for change in changes or ())
    fitting = Fitting(loaded.config, resolved, plugins, Path("runs"), available, loaded.origins, own_bridge=own)
    if fitting.longest <= PROMPT_TOKENS:
        raise FitError(
            f"the model in {resolved.directory} has {fitting.longest:,} positions, and plans count a prompt of {PROMPT_TOKENS} tokens.",
            remedy="`atropos run --dry-run` prints the plan of a run with shorter prompts.",
        )
    console.say(f"{size.parameters:,} parameters in {resolved.directory}; {_devices(available)}")
    layout = layout_of(resolved.directory, GrpoOptions.model_validate(loaded.config.trainer.options))
    if layout.name == "rows":
        console.say(f"trainer {layout.line}")
    with waiting("what fits"):
        found = fitting.each()
    wanted = fitting.wanted
    console.table(
        ("train", "bridge", "longest context", f"at {wanted:,} tokens: at once", "sequences", "needs", "price"),
        [_row(one, fitting) for one in found],
    )
    shared = "; a group's prompt counts once in it"
    console.say(
        f"a context is a prompt of {PROMPT_TOKENS} tokens with its reply; at once: tokens of the micro-batch that a run chooses "
        f"(trainer.tokens_per_microbatch), or of one sequence if that is longer{'' if layout.name == 'rows' else shared}"
    )
    chosen = best(found, wanted)
    if chosen is None:
        why = "; ".join(dict.fromkeys(one.refused for one in found if one.refused))
        raise FitError(
            f"no way to train this model has room for {wanted:,} tokens on {_devices(available)}.{f' {why}' if why else ''}",
            remedy="Name a shorter --context, a smaller model, or a larger device: --gpu 80.",
        )
    console.say(f"take: {chosen.way.name}")
    if chosen.way.quantized and not fitting.rounded_already(chosen.way):
        rounded = f"./{resolved.directory.name}-{chosen.way.quantized}"
        console.say(
            f"  atropos quantize {shlex.quote(str(model or resolved.directory))} {shlex.quote(rounded)} --format {chosen.way.quantized}"
        )
        model = rounded
    named = bool(loaded.config.environment)
    console.say(f"  {typed_command(chosen, fitting, file, model, engine, changes, wanted, gpu is not None, named)}")


def memory_bytes(option: str, text: str) -> int:
    """The bytes of a memory as a person types it: "24" (as memory is sold: GiB), "24GB" or "24 GiB". Raises ConfigError."""
    from atropos_core.errors import ConfigError

    read = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?(GB|GiB)?", text.strip(), re.IGNORECASE | re.ASCII)
    if read is None or not 1 <= float(read[1]) <= MOST_GIGABYTES:
        raise ConfigError(
            f"{option} {text!r} is not a size of memory.",
            remedy=f"Give gigabytes from 1 to {MOST_GIGABYTES:,}, as {option} 24, {option} 24GB or {option} 24GiB.",
        )
    return int(float(read[1]) * (10**9 if (read[2] or "").upper() == "GB" else 2**30))


def _row(one: Fitted, fitting: Fitting) -> tuple[str, ...]:
    if one.refused:
        return one.way.name, one.bridge, "-", "-", "-", "-", one.refused
    longest = (
        f"{one.context:,}" + (" (all positions)" if one.context >= fitting.longest else "") if one.context else "none"
    )
    needs = ", ".join(f"{device} {size / 1e9:.1f} GB" for device, size in one.needed.items())
    fits = f"{one.microbatch:,}" if one.microbatch else "does not fit"
    return one.way.name, one.bridge, longest, fits, str(one.sequences(fitting.wanted)), needs, one.way.costs


def _devices(available: dict[str, int]) -> str:
    return ", ".join(f"{device} has {size / 1e9:.1f} GB" for device, size in available.items())


def typed_command(
    chosen: Fitted,
    fitting: Fitting,
    file: Path | None,
    model: str | None,
    engine: str | None,
    changes: list[str] | None,
    wanted: int,
    on_gpu: bool,
    environments: bool,
) -> str:
    """The command that trains so. `environments`: whether the file names any."""
    from atropos_core.plugins.model_provider import PROMPT_TOKENS

    words = [
        "atropos run",
        *([shlex.quote(str(file))] if file else []),
        *([f"--model {shlex.quote(model)}"] if model else []),
    ]
    words += [] if environments else ["--env NAME"]
    by_setting = any(change.startswith("bridge.use") for change in changes or ())
    words += [] if by_setting else [f"--bridge {shlex.quote(chosen.bridge)}"]
    words += [f"--engine {shlex.quote(engine)}"] if engine else []
    settings = [f"sampling.max_tokens={wanted - PROMPT_TOKENS}"]
    settings += [f"{path}={str(value).lower()}" for path, value in chosen.sizes.items()]
    options = fitting.trainer_options(chosen.way)
    settings += [f"trainer.{name}={str(value).lower()}" for name, value in options.items() if name != "lora"]
    settings += [f"trainer.lora.{name}={value}" for name, value in chosen.way.options.get("lora", {}).items()]
    settings += [f"engine.{name}={str(value).lower()}" for name, value in fitting.engine_options(chosen.way).items()]
    settings += ['engine.devices=["cuda:0"]', 'trainer.devices=["cuda:0"]'] if on_gpu else []
    return " ".join([*words, *(f"--set {shlex.quote(one)}" for one in (*(changes or ()), *settings))])
