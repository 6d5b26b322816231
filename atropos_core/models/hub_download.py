"""Download a model from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from atropos_core.errors import ConfigError


def download_model(reference: str, *, weights: bool = True) -> Path:
    """Return the local directory of a Hugging Face id, without `weights` of its configuration only. Raises ConfigError."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model {reference!r:.300} is neither a name that a plugin knows nor a directory, and huggingface_hub is not installed.",
            remedy="Give a directory that holds config.json, or pip install huggingface_hub.",
        ) from error
    try:
        wanted = None if weights else ["*.json"]
        unwanted = ["*.bin", "*.pth", "*.gguf", "original/*"]
        return Path(snapshot_download(reference, allow_patterns=wanted, ignore_patterns=unwanted))
    except (OSError, ValueError) as error:  # the library's errors derive from these
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model {reference!r:.300} is neither a name that a plugin knows nor a directory, and the hub did not give it: {first}",
            remedy="Use `--model tiny`, a directory that holds config.json, or a Hugging Face id that this machine can reach.",
        ) from error
