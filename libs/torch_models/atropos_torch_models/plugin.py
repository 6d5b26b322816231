"""Offers GGUF files as models: `--model FILE.gguf`, or a directory with one such file."""

from __future__ import annotations

from atropos_core import hookimpl
from atropos_core.plugins.provider import ResolvedModel


@hookimpl
def atropos_resolve_model(reference: str) -> ResolvedModel | None:
    from atropos_torch_models.gguf_cache import find_file, model_directory

    file = find_file(reference)
    if file is None:
        return None
    directory, line = model_directory(file)
    return ResolvedModel(directory, line)
