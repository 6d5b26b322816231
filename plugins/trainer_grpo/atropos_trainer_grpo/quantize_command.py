"""`atropos quantize`."""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from atropos_core.errors import AtroposError, ConfigError, DataError
from atropos_trainer_grpo.optional_packages import require


def add(app: typer.Typer) -> None:
    app.command("quantize", rich_help_panel="Train")(quantize)


class Dtype(StrEnum):
    """The dtype of the written weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Format(StrEnum):
    """The format of a base in fewer bits."""

    NF4 = "nf4"
    INT8 = "int8"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a name on the Hugging Face hub.")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write the rounded model.")],
    format: Annotated[Format, typer.Option(help="nf4: 4 bits; int8: 8 bits.")] = Format.NF4,
    dtype: Annotated[
        Dtype | None, typer.Option(help="The dtype that the run will use; unset: the one of the stored weights.")
    ] = None,
) -> None:
    """Round a model's linear layers to 4 or 8 bits, for LoRA on a base that the trainer holds in these bits.

    The result is an ordinary model that any engine loads, of the same size unless --dtype is another. Embeddings, norms and the
    head are not rounded.

    [bold]Examples[/]

      atropos quantize tiny ./tiny-nf4

      atropos run --env gsm8k --model ./tiny-nf4 --bridge lora --set trainer.lora.quantization=nf4
    """
    from atropos_core import console
    from atropos_core.cli.options import configure
    from atropos_core.console.waits import waiting

    if format is Format.NF4:
        require("bitsandbytes", "rounding to 4 bits")
    if directory.exists():
        raise ConfigError(f"{directory} already exists.", remedy="Choose a directory that does not exist.")
    _, resolved, _ = configure(None, model=model)
    with waiting(f"{model} to be rounded"):
        layers, weights = write(resolved.directory, directory, format, dtype)
    console.say(f"{layers:,} linear layers with {weights:,} weights are rounded to {format} in {directory}")
    console.say(
        f"  atropos run --model {console.quoted(directory)} --bridge lora --set trainer.lora.quantization={format}"
    )


def write(model: Path, directory: Path, kind: str = "nf4", dtype: str | None = None) -> tuple[int, int]:
    """Write the model with its linear layers on the grid, one file at a time, in its own dtype or another. Returns the number of
    layers and of weights. Raises ConfigError, DataError; an unfinished directory is removed."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    from atropos_core.models.model_size import read
    from atropos_trainer_grpo.quantization import rounded

    size = read(model)
    if size is None or not (names := size.linear()):
        raise ConfigError(
            f"{model} does not have linear layers to round: it needs config.json and safetensors.",
            remedy="Give the directory of a Hugging Face model.",
        )
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    weights = 0
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:  # another user's, or no space: it stays
        raise DataError(f"{unfinished} cannot be created: {error}", remedy="Choose another directory.") from error
    try:
        for path in sorted(one for one in model.iterdir() if one.is_file() and one.suffix != ".bin"):
            if path.suffix != ".safetensors":
                shutil.copy2(path, unfinished / path.name)
                continue
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                metadata = file.metadata()
            if dtype is not None:  # before rounding: the grid is that of the written numbers
                tensors = {
                    name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
                    for name, tensor in tensors.items()
                }
            for name in names.keys() & tensors.keys():
                weights += tensors[name].numel()
                tensors[name] = rounded(tensors[name], kind)
            save_file(tensors, unfinished / path.name, metadata=metadata)
        if dtype is not None:
            config = json.loads((unfinished / "config.json").read_text())
            (unfinished / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        unfinished.rename(directory)
    except AtroposError:
        raise
    except (OSError, SafetensorError) as error:
        raise DataError(f"{model} could not be rounded into {directory}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return len(names), weights
